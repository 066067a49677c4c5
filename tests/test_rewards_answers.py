"""Finding and comparing answers; each test names one property. Real golds come from ../shared/data where present."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import quick, until
from hypothesis import example, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import rewards  # noqa: E402
from rewards import check_golds, equivalent, final_answer, number, partial_credit  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is absent")


def judged(completion, gold):
    """A completion goes in as it is or by its final answer; both must say the same."""
    found, direct = equivalent(final_answer(completion), gold), equivalent(completion, gold)
    assert found == direct, (completion, gold, found, direct)
    return found


@pytest.mark.parametrize(
    "completion, answer",
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"so \boxed{\sqrt{\frac{a}{b}}} it is", r"\sqrt{\frac{a}{b}}"),
        (r"\fbox{7}", "7"),
        (r"\boxed {12}", "12"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"first \boxed{3} and then \boxed{1/2", "3"),
        (r"I think \boxed{3}. Wait, so \boxed{4}.", "4"),
        (r"\boxed{1},\boxed{2}", "1,2"),
        (r"$\boxed{1}$, $\boxed{2}$ and $\boxed{3}$", "1,2,3"),
        (r"\boxed{8} \boxed{8}", "8"),
        ("Final Answer: 5", "5"),
        ("**Final Answer:** 5", "5"),
        ("**Final Answer**: 5.", "5"),
        ("## Final answer: **1/2**", "1/2"),
        ("FINAL ANSWER: $\\boxed{5}$", "5"),
        ("Final Answer:\n\n\\boxed{9}", "9"),
        ("The final answer is: 12", "12"),
        ("\\boxed{3}\nFinal Answer: 5", "5"),
        ("Final Answer: 3\nNo, wrong.\nFinal Answer: 5", "5"),
        ("Final Answer: 5\n\\boxed{6}", "5"),
    ],
)
def test_strict_answer_is_the_last_line_or_box(completion, answer):
    assert final_answer(completion, strict=True) == answer


@pytest.mark.parametrize(
    "completion", ["the answer is 5", "#### 5", "5", "", r"\boxed{5", "Final Answer:", r"\boxed{}"]
)
def test_strict_finds_nothing_without_a_line_or_box(completion):
    assert final_answer(completion, strict=True) is None


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("#### 1,234", "1,234"),
        ("6*7 = <<6*7=42>>42\n#### 42", "42"),
        ("#### Step 1: add\n#### 17", "17"),
        ("The answer is 42. I checked 7 cases and 13 others", "42"),
        ("Answer: 42, which I checked on 7 cases.", "42"),
        ("So the correct answer is **42**.", "42"),
        ("The total is 72 clips, altogether.", "72"),
        ("the order is $29.00.", "$29.00"),
        ("she makes a $70,000 profit.", "$70,000"),
        ("3 + 4 = 7", "3 + 4 = 7"),
        ("I get 12 from 5 and then 12 - 5 = 7", "7"),
    ],
)
def test_loose_answer(completion, answer):
    assert final_answer(completion) == answer


@pytest.mark.parametrize(
    "completion", ["", "no idea", "I don't know.", "9**9**9", "factorial(10**9)", "__import__('os')"]
)
def test_loose_answer_is_none_where_no_number_stands_alone(completion):
    assert final_answer(completion) is None


SAME = {
    "a01": [
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{\dfrac{3}{4}}", "3/4"),
        (r"$\boxed{\frac{\sqrt{3}}{2}}$", r"\sqrt{3}/2"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{x^{2}+\frac{1}{x}}", r"x^2+1/x"),
    ],
    "a02": [
        (r"I think \boxed{3}. Wait, so \boxed{4}.", "4"),
        (r"\boxed{3} is wrong; it must be \boxed{4}", "4"),
        ("\\boxed{10}\n\nLet me check.\n\n\\boxed{12}", "12"),
        (r"We had \boxed{3}, hmm, now we have \boxed{4}", "4"),
    ],
    "a03": [
        (r"\boxed{1},\boxed{2}", "1, 2"),
        (r"\boxed{2} and \boxed{1}", "1,2"),
        (r"$\boxed{-2}$, $\boxed{1}$", "1,-2"),
    ],
    "a04": [(r"2,552,004 … \boxed{004} … \boxed{004}", "4"), (r"\boxed{007}", "7"), ("Final Answer: 0012", "12")],
    "a05": [
        ("The answer is 42. I checked 7 cases and 13 others", "42"),
        ("The answer is $42$. There were 3 of them.", "42"),
        ("Answer: 42\nI looked at 7 cases", "42"),
        ("The final answer is 15. I used 3 steps", "15"),
        ("The correct answer is 1,200. It took 5 tries.", "1200"),
    ],
    "a06": [
        ("The total is 72 clips, altogether.", "72"),
        ("Natalia sold 48 + 24 = 72 clips.", "72"),
        ("72 clips", "72"),
        ("In total, 72.", "72"),
        ("She sold 72 clips altogether!", "72"),
        ("There are 5 dogs left", "5"),
        ("18 (dollars)", "18"),
        ("$18/day", "18"),
    ],
    "a07": [
        ("the order is $29.00.", "29"),
        ("It costs $29.50.", "29.5"),
        ("the price was $ 29.00", "29"),
        (r"\$29.00", "29"),
        ("He pays 29.00 dollars.", "29"),
        ("The answer is $29.00.", "29"),
        ("€29.00", "29"),
    ],
    "a08": [
        ("#### 1,234", "1234"),
        ("a $70,000 profit.", "70000"),
        ("1,234,567", "1234567"),
        ("1234", "#### 1,234"),
        ("12,345.60", "12345.6"),
        (r"10,\!080", "10080"),
        ("10{,}080", "10080"),
        ("10 080", "10080"),
        (r"10\,080", "10080"),
        ("#### $1,000", "1000"),
        ("-1,234", "-1234"),
    ],
    "a09": [
        ("2 1/2", "5/2"),
        (r"2\frac{1}{2}", "5/2"),
        ("-1 3/4", "-7/4"),
        ("1.25", "1 1/4"),
        (r"137 \frac12", "137.5"),
        ("Final Answer: 2 1/2", "2.5"),
        ("2½", "5/2"),
        ("She needs 2 1/2 cups", "5/2"),
    ],
    "a10": [
        (r"28\%", "$0.28$"),
        (r"$28\%$", "$0.28$"),
        ("28%", "28"),
        ("5", r"$5\%$"),
        ("5", r"5\%"),
        ("0.05", "$5\\%$"),
        ("28 percent", "0.28"),
        ("12.5%", "1/8"),
        (r"28\%", "28%"),
        ("The discount is 28%.", "28"),
    ],
    "a11": [
        ("1.5e3", "1500"),
        ("1e-5", "0.00001"),
        ("1.5E+3", "1500"),
        (r"1.5 \times 10^3", "1500"),
        (r"2\cdot 10^{-3}", "0.002"),
        ("6.02e23", r"6.02 \times 10^{23}"),
        ("the value is 1.5e3", "1500"),
        (".5", "0.5"),
        ("1.50", "1.5"),
        ("5.", "5"),
    ],
    "a12": [
        ("The answer is −3.", "-3"),
        ("(-3)", "-3"),
        ("−3", "-3"),
        ("– 3", "-3"),
        ("It is -3.", "-3"),
        ("$-3$", "-3"),
        (r"\boxed{−3}", "-3"),
        ("-1/2", r"\frac{-1}{2}"),
        (r"-\frac{1}{2}", r"\frac{1}{-2}"),
        ("-$5", "-5"),
    ],
    "a13": [
        ("1728 and 1331", "1331 and 1728"),
        ("1331, 1728", "1331 and 1728"),
        (r"\{1728,1331\}", "1331 and 1728"),
        ("The answers are 1331 and 1728.", "1331 and 1728"),
        ("x = 3 or x = -2", "-2, 3"),
        (r"1 \pm \sqrt{2}", r"1-\sqrt2,1+\sqrt2"),
        (r"3\text{ and }4", "3,4"),
    ],
    "a14": [
        ("$(0,12.5)$", "$0<x<12.5$"),
        ("$0<x<12.5$", "$(0,12.5)$"),
        (r"$0 \le x < 5$", "[0,5)"),
        (r"x \ge 2", r"[2,\infty)"),
        ("x > 5", r"(5,\infty)"),
        (r"x \in [-2,7]", "[-2,7]"),
        ("[-2,7]", r"-2 \leq x \leq 7"),
        ("5 < x", "x > 5"),
        ("12.5 > x > 0", "0<x<12.5"),
        ("So 0 < x < 12.5.", "(0,12.5)"),
        (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)"),
        ("2x + 1 < y", "y > 1 + 2x"),
    ],
    "a15": [(r"\frac{1}{2^{99}}", r"2^{-99}"), (r"2^{10}", "1024"), (r"\frac{10!}{8!}", "90"), (r"\binom{5}{2}", "10")],
    "a16": [
        ("3x + 4y + 14=0", "6x+8y+28=0"),
        ("y = 2x + 3", "2x - y + 3 = 0"),
        ("3*x-1*y+13=0", "3x-y+13=0"),
        ("x=5", "5"),
        ("5", "x=5"),
        ("5=x", "x=5"),
        ("f(x) = x^2", "x**2"),
        ("2k+2", "2(k+1)"),
        ("(x+1)^2", "x^2+2x+1"),
        ("(a+b)(a-b)", "a^2-b^2"),
        (r"\frac{1}{x}+\frac{1}{y}", r"\frac{x+y}{xy}"),
    ],
    "a17": [
        (r"$4\sqrt(2)$", r"4\sqrt{2}"),
        (r"4\sqrt2", r"\sqrt{32}"),
        ("4*sqrt(2)", r"4\sqrt{2}"),
        (r"\sqrt[3]{-8}", "-2"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
        ("4√2", r"4\sqrt{2}"),
        (r"$\sqrt{16}$", "4"),
    ],
    "a18": [
        ("pi/2", r"\frac{\pi}{2}"),
        ("-2*pi", r"-2\pi"),
        ("2π", r"2\pi"),
        (r"\sin 30^\circ", "1/2"),
        (r"e^{2}", "e^2"),
        (r"\cos\frac{\pi}{3}", "0.5"),
        (r"\log_2 8", "3"),
        (r"\ln e", "1"),
        ("sqrt(2)/2", r"\frac{\sqrt{2}}{2}"),
        ("6 - 5i", "-5i+6"),
        (r"90^\circ", "90"),
        ("90°", r"90^\circ"),
        ("90 degrees", r"90^\circ"),
        (r"\tan^2 x", r"(\tan x)^2"),
    ],
    "a19": [("3:4", "$3:4$"), ("3 : 4", "3:4"), ("$12:00$", "12:00"), ("The answer is 3:4.", "3:4")],
    "text": [
        (r"\text{Evelyn}", "Evelyn"),
        ("The answer is Evelyn.", r"\text{Evelyn}"),
        ("(C)", "C"),
        ("C", r"\text{(C)}"),
        ("East", r"\text{east}"),
        (r"\textbf{(A)}", "A"),
        (r"15\mbox{ cm}^2", "15"),
        (r"5.4 \text{ cents}", "5.4 cents"),
        ("15 cm", r"15\text{ cm}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
        ("52_8", "52_{8}"),
        ("(3, 4)", r"\left(3,4\right)"),
        (r"\left( 3, \frac{\pi}{2} \right)", "(3,pi/2)"),
        ("x^2 * y", "x^2y"),
        ("`42`", "42"),
        ("**42**", "42"),
        (r"\(42\)", "42"),
        (r"\[42\]", "42"),
        (r"\\frac{1}{2}", "1/2"),
        ("0.3333333333", "1/3"),
    ],
}
OTHER = {
    "a03": [
        (r"\boxed{1},\boxed{2},\boxed{3},\boxed{4}", "4"),
        (r"\boxed{1}, \boxed{2}", "2"),
        (r"\boxed{3} and \boxed{4}", "4"),
        ("1,2,3,4", "4"),
    ],
    "a05": [("The answer is 42. I checked 7 cases and 13 others", "13"), ("The answer is 42. It is not 43.", "43")],
    "a06": [("The total is 72 clips, altogether.", "71"), ("72 clips", "7")],
    "a08": [("1,234", "234"), ("1,234", "1"), ("#### 1,234", "1.234"), ("70,000", "70")],
    "a09": [("2 1/2", "1"), ("2 1/2", "21/2"), ("2 1/2", "2")],
    "a10": [("5%", "500%"), ("28%", "2.8"), ("0.28", "28"), ("28%", "0.0028"), (r"$5\%$", r"$0.05\%$")],
    "a11": [("1.5e3", "1.5"), ("1e-5", "-4"), ("1e3", "3")],
    "a12": [("The answer is −3.", "3"), ("(-3)", "3"), ("-3", "3"), ("3", "-3"), ("10-3", "-3")],
    "a13": [
        ("1728", "1331 and 1728"),
        ("1331", "1331 and 1728"),
        ("1331 and 1728 and 9", "1331 and 1728"),
        ("1331 and 1729", "1331 and 1728"),
        ("The roots are 1331 and 1728.", "1728"),
        ("1,1", "1,2"),
        ("The answer is 1331 and 1728.", "1728"),
    ],
    "a14": [
        ("$[0,12.5]$", "$0<x<12.5$"),
        ("(0,12)", "0<x<12.5"),
        ("x < 5", "x > 5"),
        (r"x \ge 2", r"(2,\infty)"),
        ("12.5", "$0<x<12.5$"),
        ("(2,1)", "(1,2)"),
        ("[1,2)", "(1,2]"),
    ],
    "a15": [
        (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
        ("2^{200}", "2^{200}+1"),
        ("10^{30}", "10^{30}+1"),
        ("1000000000001", "1000000000002"),
        (r"\frac{1}{3^{50}}", r"\frac{1}{3^{51}}"),
        ("0.1234567890123", "0.1234567890124"),
        ("3.14", r"\pi"),
        ("0.33", "1/3"),
        ("1.41", r"\sqrt{2}"),
    ],
    "a16": [
        ("3x + 4y + 14=0", "3*x-1*y+13=0"),
        ("x=5", "6"),
        ("x=5", "y=5"),
        ("2x=10", "10"),
        ("x+1", "x-1"),
        ("x=y", "x=-y"),
        ("x^2", "x^3"),
        ("R^2", "r^2"),
        ("y=2x", "y=3x"),
        ("x", "y"),
        ("|x|", "x"),
    ],
    "a17": [
        (r"$4\sqrt(2)$", "4"),
        (r"$4\sqrt(2)$", "2"),
        (r"4\sqrt{2}", "8"),
        (r"So it is $4\sqrt{2}$.", "4"),
        (r"2^{3}", "3"),
        (r"5\pi", "5"),
        ("5x", "5"),
    ],
    "a18": [("pi/2", r"\frac{\pi}{3}"), ("-2*pi", r"2\pi"), ("2*pi", "2"), ("pi/2", "2")],
    "a19": [("$1:00$", "$12:00$"), ("4:3", "3:4"), ("1:00", "1"), ("3:4", "4")],
    "text": [
        ("Evelyn", "Navin"),
        ("(A)", "(B)"),
        ("", "5"),
        (" ", "5"),
        ("east", "eats"),
        ("52_8", "52_9"),
        ("52", "52_8"),
        ("(3,4)", "(4,3)"),
        ("(1,2,3)", "(1,2)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        (r"\{1,2\}", "(1,2)"),
        ("even", "odd"),
    ],
}


@pytest.mark.parametrize("case, completion, gold", [(k, *pair) for k, pairs in SAME.items() for pair in pairs])
def test_equal(case, completion, gold):
    assert judged(completion, gold) if case != "text" or final_answer(completion) else equivalent(completion, gold)


@pytest.mark.parametrize("case, completion, gold", [(k, *pair) for k, pairs in OTHER.items() for pair in pairs])
def test_not_equal(case, completion, gold):
    assert not judged(completion, gold)


def test_no_answer_is_wrong():
    assert not equivalent(None, "5") and not equivalent("5", "") and not equivalent("", "")


HOSTILE = [
    "9**9**9",
    "9 ** 9 ** 9",
    "$9^{9^{9}}$",
    "$(10^9)!$",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    "factorial(10**9)",
    "10^{10^{10}}",
    "((9!)!)!",
    "5!!!!!!",
    r"\binom{10^9}{10^8}",
    "1e999999999",
    r"\sum_{k=1}^{10^{12}} k",
    r"\int_0^1 x^{99999} dx",
    "(1+x)^{99999}",
    r"\sqrt[10^9]{2^{10^9}}",
    r"\frac{1}{10^{-10^{9}}}",
    "(" * 400,
    "{" * 500,
    "(9^" * 160 + "2" + ")" * 160,
    "\\sqrt{" * 80 + "2" + "}" * 80,
    "1+" * 250 + "2",
    "9*" * 250 + "3",
    "x^9*" * 120 + "y",
    "1," * 250 + "2",
    "(1,(" * 80,
    "\\frac" * 100,
    "-" * 511,
    "2^-" * 150,
    "x=" * 250,
    "a and " * 80,
    "9" * 500,
    "0." + "9" * 500,
    "9" * 1_000_000,
    "x" * 1_000_000,
    " " * 1_000_000,
    "\n" * 1_000_000,
    "*" * 1_000_000,
    "\\boxed{" * 150_000,
    "\\boxed{1}," * 100_000,
    "{" * 1_000_000,
    "Final Answer: " * 70_000,
    "Final Answer:\n" * 70_000,
    "answer is " * 100_000,
    "#### " * 200_000,
    "$" * 1_000_000,
    "$1" * 500_000,
    "1 " * 500_000,
    "1/" * 500_000,
    "=" * 1_000_000,
    "** " * 300_000,
    "a.\n" * 300_000,
    "\\frac{1}{" * 100_000,
    "1,234," * 160_000,
    "\\(" * 500_000,
    "step 1 " * 140_000,
    "\ud800" * 100,
]


@pytest.mark.parametrize("text", HOSTILE, ids=[repr(x[:18]) for x in HOSTILE])
def test_hostile_text_costs_under_a_second_and_is_wrong(text):
    for completion in (text, f"The answer is {text}", f"Final Answer: {text}", f"\\boxed{{{text}}}"):
        for gold in ("17", r"(x^2, \sqrt{17})"):
            with quick():
                assert not equivalent(completion, gold) and not equivalent(final_answer(completion), gold)


@pytest.mark.parametrize("text", HOSTILE[:8])
def test_hostile_power_is_wrong_for_the_numbers_it_is_made_of(text):
    assert not any(judged(text, str(n)) for n in (1, 2, 5, 9, 10))


def test_time_grows_linearly_with_the_text():
    with quick():
        final_answer("Step 1: 3 + 4 = 7 is $x$ {answer} **b** " * 40_000)


CODE = [
    '__import__("os").system("touch PWNED")',
    "().__class__.__base__.__subclasses__()",
    "eval(\"open('PWNED','w')\")",
    "exec('1')",
    "open('PWNED','w').write('1')",
    "lambda: 0",
    "[x for x in ().__class__.__mro__]",
    r"\text{__import__('os').system('touch PWNED')}",
]


@pytest.mark.parametrize("code", CODE)
def test_code_in_an_answer_is_never_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def refuse(*_, **__):
        raise AssertionError("reached")

    for where, name in (
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("os", "system"),
        ("subprocess", "Popen"),
        ("os", "fork"),
    ):
        monkeypatch.setattr(f"{where}.{name}", refuse)
    for completion in (code, f"\\boxed{{{code}}}", f"Final Answer: {code}", f"${code}$"):
        assert not judged(completion, "5") and not equivalent("5", completion)
    assert not list(tmp_path.iterdir())


def test_memory_stays_bounded_and_no_process_or_heavy_module_is_needed():
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (400 << 20,) * 2)\n"
        "from rewards import equivalent, final_answer\n"
        f"for text in {HOSTILE[:30]!r}: assert not equivalent(final_answer(text), '17')\n"
        "assert not {'torch', 'sympy', 'numpy', 'multiprocessing'} & set(sys.modules)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ}
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == "0"


def test_eight_threads_at_once_agree_with_the_main_thread():
    pairs = (
        [pair for pairs in [*SAME.values(), *OTHER.values()] for pair in pairs]
        + [("1/2", "1/2")]
        + [(x, "17") for x in HOSTILE[:20]]
    )
    expected = [equivalent(*p) for p in pairs]
    for cached in (rewards._equivalent, rewards._clean, rewards._latex):
        cached.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda seed: [equivalent(*p) for p in pairs], range(8)):
            assert found == expected


WORKER_HOSTILE = [
    "(10^9)!",
    "9^{9^{9}}",
    r"2^{2^{2^{2^{2^{2}}}}}",
    "(1+x)^{99999}",
    "(" * 3000 + "1" + ")" * 3000,
    "9" * 100_000,
]


def ask(answer, gold):
    rewards._left.set(rewards.DEADLINE)
    return rewards._ask(answer, gold)


def session(leader):
    """Processes of the worker's session, zombies too."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("tex", WORKER_HOSTILE, ids=[x[:18] for x in WORKER_HOSTILE])
def test_a_hostile_expression_behind_the_screen_costs_under_a_second(tex):
    assert ask(r"2\sqrt {2}", r"\sqrt {8}")
    leader = rewards._worker.pid
    with quick():
        assert not ask(tex, "5") and ask(r"2\sqrt {2}", r"\sqrt {8}")
    assert rewards._worker.pid == leader and len(session(leader)) == 2


def test_hostile_parts_of_a_list_share_one_deadline():
    assert equivalent(r"\sqrt{2}+1", r"1+\sqrt{2}")
    parts = [f"e^{{e^{{e^{{e^{{{x}}}}}}}}}" for x in "xyz"]
    assert all(rewards._latex(rewards._clean(x)) for x in parts)
    before = rewards._worker.pid
    with quick():
        assert not equivalent(", ".join(parts), r"a+1, b+1, c+1")
    assert rewards._left.get() == 0 and rewards._worker.pid == before
    assert equivalent(r"\sqrt{3}+1", r"1+\sqrt{3}")


@pytest.mark.parametrize("text", HOSTILE[:28], ids=[repr(x[:18]) for x in HOSTILE[:28]])
def test_the_screen_keeps_hostile_text_from_math_verify(text):
    assert rewards._latex(rewards._clean(text)) is None


@pytest.mark.parametrize("victim", ["leader", "child"])
def test_a_worker_killed_from_outside_is_replaced(victim):
    assert ask(r"2\sqrt {2}", r"\sqrt {8}")
    leader = rewards._worker.pid
    for pid in session(leader):
        if (victim == "leader") == (pid == leader):
            os.kill(pid, signal.SIGKILL)
    if victim == "leader":
        until(lambda: rewards._worker.poll() is not None)
    assert ask(r"2\sqrt {3}", r"\sqrt {12}") and not ask(r"2\sqrt {3}", r"\sqrt {8}")
    until(lambda: not session(leader))


def test_a_late_reply_does_not_answer_the_next_question():
    assert ask(r"2\sqrt {2}", r"\sqrt {8}")

    def interrupt():
        until(lambda: rewards._worker is None)  # a question is on its way
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # which ends the wait for its reply

    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        while True:
            ask("9^{9^{9}}", "5")
    thread.join()
    assert ask(r"2\sqrt {5}", r"\sqrt {20}")


LIFE = """
import os, resource, signal, sys, threading, time
import rewards

def ask(answer, gold):
    rewards._left.set(rewards.DEADLINE)
    return rewards._ask(answer, gold)

def honest(n=2):
    root = rf"{n}\\sqrt {{2}}"
    return ask(root, rf"\\sqrt {{{2 * n * n}}}") and not ask(root, "3 x ")

def in_threads(count, work):
    said = []
    threads = [threading.Thread(target=lambda k=k: said.append(work(k + 2))) for k in range(count)]
    [t.start() for t in threads], [t.join() for t in threads]
    return said

assert in_threads(1, honest) == [True]  # first from a thread that is not the main one
leader = rewards._worker.pid
signal.signal(signal.SIGINT, lambda *_: None)
os.killpg(0, signal.SIGINT)
assert honest(9) and rewards._worker.pid == leader
if sys.argv[1] == "exit":
    assert in_threads(8, honest) == [True] * 8
    if not (child := os.fork()):
        os._exit(0 if honest() and rewards._worker.pid != leader else 1)
    assert os.waitpid(child, 0)[1] == 0 and honest(11) and rewards._worker.pid == leader
    assert not ask("9^{9^{9}}", "5")
print(leader, flush=True)
if sys.argv[1] == "exit":
    sys.exit()
threading.Thread(target=lambda: [ask("9^{9^{9}}", "5") for _ in range(9)]).start()
while rewards._worker is not None:  # until a question is on its way
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_worker_serves_threads_and_forks_survives_ctrl_c_and_ends_with_its_parent(end):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    out = subprocess.run(
        [sys.executable, "-c", LIFE, end],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert out.returncode == (0 if end == "exit" else -signal.SIGKILL)
    until(lambda: not session(int(out.stdout)))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 700_000)


def test_math_verify_that_is_not_installed_is_one_clear_error(monkeypatch):
    if sys._base_executable == sys.executable:
        pytest.skip("needs a virtual environment")
    monkeypatch.setattr(sys, "executable", sys._base_executable)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if "site-packages" not in p])
    monkeypatch.setattr(rewards, "_worker", None)
    with pytest.raises(RuntimeError, match="pip install math-verify"):
        equivalent(r"5\sqrt{2}", r"\sqrt{51}")
    assert equivalent("1/2", "0.5")


NOTHING_RUNS = r"""
import builtins, os, subprocess, sys
from sandbox import answers
pairs = [(r"\frac {1}{ x }+\frac {1}{ y }", r"\frac { x + y }{ x  y }"), (r"2\sqrt {2}", r"\sqrt {8}"),
         ("2 x =4", " x =2"), (r"\sin (30*\pi /180)", "0.5"), (r"\log _{2} 8", "3"), ("| x |", " x "),
         (" x <3", "3> x "), ("( x +1)^{2}", " x ^{2}+2 x +1")]
for pair in pairs:
    answers.verdict(*pair)  # what is imported late is imported now
from sympy.core.cache import clear_cache
clear_cache()

def refuse(name):
    def reached(*args, **_):
        print("reached", name, args)
        os._exit(1)
    return reached

for module, names in ((builtins, ["eval", "exec", "open", "compile"]), (os, ["system", "popen", "fork"]),
                      (subprocess, ["Popen"])):
    for name in names:
        setattr(module, name, refuse(name))
for pair in [*pairs, ("( a +2)^{2}", " a ^{2}+4 a +4"), *[(x, "5") for x in CODE]]:
    try:
        answers.verdict(*pair)
    except Exception:
        pass
os._exit(0)
"""


def test_neither_the_screen_nor_the_worker_evaluates_code(tmp_path):
    script = NOTHING_RUNS.replace("CODE", repr([*CODE, "x.__class__", r"\operatorname{exec}(1)"]))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    out = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    assert not list(tmp_path.iterdir())
    assert all(rewards._latex(rewards._clean(code)) is None for code in CODE)


@pytest.mark.parametrize(
    "answer, gold, same",
    [
        ("(1+i)^2", "2i", True),
        (r"\frac{\pi}{2^{99}}", r"\frac{\pi}{2^{98}}", False),
        ("x^2+y^2=-1", "x^2+y^2=-2", False),
        ("-2x=4", "x=-2", True),
        ("x=x", "x=4", False),
        ("2(3)", "5", False),
        ("2(3)(x)", "6x", True),
        (r"\log_2(8)", "3", True),
        ("2h", "2", False),
        ("R^2", "r^2", False),
        ("sqrt(2(3))", r"\sqrt6", True),
        ("10^{-12}", "2*10^{-12}", False),
        (r"\infty", r"-\infty", False),
        ("2^{10}", "1025", False),
        ("a_1+a_2", "a_2+a_1", True),
        ("a_1", "a_2", False),
        ("x^(1/3)", r"\sqrt[3]{x}", True),
        ("0.5x", "x/2", True),
        (r"\left(\frac12,\infty\right)", "x>1/2", True),
        ("1.4142135624", r"\sqrt{2}", True),
        ("1.414214", r"\sqrt{2}", False),
    ],
)
def test_what_math_verify_alone_gets_wrong_or_reads_otherwise(answer, gold, same):
    assert equivalent(answer, gold) == same


@given(st.text(max_size=300))
@settings(max_examples=150)
def test_any_text_equals_itself_and_never_raises(text):
    assert equivalent(text, text) or not equivalent(text, text)
    assert final_answer(text) is None or isinstance(final_answer(text), str)
    assert number(text) is None or isinstance(number(text), float)
    partial_credit(text, "5"), partial_credit("5", text), check_golds([text])


TOKENS = (
    r"\frac \sqrt { } ( ) [ ] 1 2 9 3.5 1,234 x y \pi ^ ^{ _ + - * / = < \le , ; : ! % \% $ \text{ \boxed{ and or e "
    r'i \pm | \cup \in \infty " \begin{pmatrix} \end{pmatrix} & \\ \left( \right) sin \log \circ ° \{ \} is answer '
    r"Final Answer: #### ** . e9 1e5 'a"
).split(" ")


@given(st.lists(st.sampled_from(TOKENS), max_size=60), st.sampled_from(["", " "]))
@example([r"\frac", "{", "1", "}"], "")
@settings(max_examples=250)
def test_any_mathematical_tokens_never_raise_and_are_quick(tokens, glue):
    text = glue.join(tokens)
    with quick():
        equivalent(text, "5"), equivalent("5", text), equivalent(final_answer(text), text)
        number(text), check_golds([text])
    if text.strip(" *`.,;") and not rewards.MARKED.search(text):
        assert equivalent(text, text)


@given(st.integers(-(10**15), 10**15), st.integers(1, 10**6))
@settings(max_examples=100, deadline=None)
def test_every_spelling_of_an_integer_is_equal_and_a_neighbour_is_not(n, step):
    spellings = [
        f"{n}",
        f"{n:,}",
        f"${n:,}$",
        f"\\boxed{{{n}}}",
        f"{n}.0",
        f"{n}.",
        f"#### {n:,}",
        f"The answer is {n:,}.",
        f"Final Answer: {n}",
        f"\\frac{{{2 * n}}}{{2}}",
        f"{3 * n}/3",
        f"x = {n}",
        f"{n} apples",
        f"({n})",
        f"\\({n}\\)",
        f"**{n}**",
        f"So she has {n:,} of them left.",
    ]
    for text in spellings:
        assert judged(text, str(n)), text
        assert not judged(text, str(n + step)), text
        assert equivalent(str(n), text if "So she" not in text else str(n))


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
@settings(max_examples=100, deadline=None)
def test_fractions_are_equal_exactly_when_their_values_are(p, q):
    tex = f"\\frac{{{p.numerator}}}{{{p.denominator}}}"
    assert judged(tex, f"{p.numerator}/{p.denominator}")
    assert judged(tex, str(q)) == (p == q)


def math500():
    return [json.loads(line)["answer"] for line in (DATA / "math500" / "math500.jsonl").open()]


def gsm8k():
    return [
        json.loads(line)["answer"].split("####")[1].strip()
        for name in ("train", "test")
        for line in (DATA / "gsm8k" / f"{name}.jsonl").open()
    ]


VARIANTS = {
    "dfrac": lambda a: a.replace("\\frac", "\\dfrac"),
    "frac": lambda a: a.replace("\\dfrac", "\\frac"),
    "spaced": lambda a: f"  {a.replace('+', ' + ')} ",
    "text": lambda a: f"\\text{{{a}}}",
    "period": lambda a: a + ".",
    "dollars": lambda a: f"${a}$",
    "parens": lambda a: f"\\({a}\\)",
    "box": lambda a: f"So \\boxed{{{a}}}.",
    "line": lambda a: f"Step 1: 5\n**Final Answer:** ${a}$.",
    "answer is": lambda a: f"Hence the answer is ${a}$.",
    "escaped twice": lambda a: a.replace("\\", "\\\\") if "begin" not in a and "!" not in a else a,
    "mathrm": lambda a: a.replace("\\text", "\\mathrm").replace("\\mbox", "\\text"),
    "no left right": lambda a: re.sub(r"\\(left|right)", "", a),
}


@needs_data
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_spelling_of_a_math_gold_matches_it(variant):
    failed = [
        a for a in math500() if not equivalent(VARIANTS[variant](a), a) or not equivalent(a, VARIANTS[variant](a))
    ]
    assert not failed


@needs_data
def test_math_golds_of_other_problems_do_not_match():
    golds = math500()
    alike = {
        (a, golds[(i + k) % 500])
        for k in (1, 101)
        for i, a in enumerate(golds)
        if a != golds[(i + k) % 500] and equivalent(a, golds[(i + k) % 500])
    }
    assert alike <= {("5", "x=5"), ("x=5", "5"), (r"\frac{3}{2}", "1.5")}


@needs_data
def test_every_data_set_gold_matches_itself_and_the_check_is_quick():
    with quick(10):
        assert check_golds(gsm8k()) == [] and check_golds(math500()) == []


@needs_data
def test_a_wrong_number_never_matches_a_gsm8k_gold():
    draw = random.Random(0)
    for gold in gsm8k()[::4]:
        wrong = float(gold.replace(",", "")) + draw.choice([-10, -1, -0.5, 0.01, 1, 100])
        assert not equivalent(f"{wrong:.2f}", gold) and not equivalent(f"Final Answer: ${wrong:,.2f}", gold)


def test_golds_that_can_never_match_are_listed():
    assert check_golds(["5", "", "  ", "#### 7", "1{", "no\nway", r"\frac12"]) == ["", "  ", "1{", "no\nway"]


def test_three_thousand_comparisons_a_second():
    pairs = [
        (f"Step 1: {i} + 3 = {i + 3} apples.\nStep 2: done.\nFinal Answer: {i + 3:,}", f"{i + i % 2 * 2 + 1}")
        for i in range(3000)
    ]
    start = time.process_time()
    for completion, gold in pairs:
        equivalent(final_answer(completion, strict=True), gold)
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "text, value",
    [
        ("1,234", 1234),
        ("2 1/2", 2.5),
        ("28%", 28),
        ("x = 5", 5),
        (r"\sqrt{16}", None),
        ("-3", -3),
        ("", None),
        (None, None),
        ("x", None),
        ("1,2", None),
        ("Evelyn", None),
        (r"\infty", None),
        ("2i", None),
        ("10^{400}", None),
    ],
)
def test_number(text, value):
    assert number(text) == value


@pytest.mark.parametrize(
    "answer, gold, credit",
    [
        ("5", "5", 1.0),
        ("6", "5", 1 / 1.4),
        ("100", "100.001", 0.85),
        ("0", "0.25", 1 / 1.5),
        (None, "5", 0),
        ("Evelyn", "5", 0),
        ("5", "x+1", 0),
        ("-5", "5", 0.2),
    ],
)
def test_partial_credit(answer, gold, credit):
    assert partial_credit(answer, gold) == pytest.approx(credit)


@pytest.mark.parametrize("answer, gold", [
    (r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", "16"), (r'\boxed{eval("5")}', "5"),
    (r"\boxed{lambda: 5}", "5"),
    ("().__class__.__base__.__subclasses__()[5]", "5"), ("import os; 5", "5"), ("Final Answer: 5 (not 4)", "4"),
    ("1 2 3 4", "4"),
    ("either 5 or 4", "4"), ("5 = 4", "4"), ("4 thousand", "4"), ("4 dozen", "4"), ("negative 4", "4"),
    ("minus 4", "4"), ("3x-y+13=0", "3x-y+13"), ("2x+3=7", "2x+3"), ("the answer is 42 (checked 7 ways).", "7"),
])
def test_a_number_inside_something_else_is_not_the_answer(answer, gold):
    assert not equivalent(answer, gold) and not equivalent(final_answer(answer, strict=True), gold)


@pytest.mark.parametrize("answer, gold", [
    ("$1.5 million", "1500000"), ("2 dozen", "24"), ("negative 4", "-4"), ("1,331 and 1,728", "1331 and 1728"),
    ("{1331, 1728}", "1331 and 1728"), ("The correct answer is **C**.", "C"), ("it costs $29", "29"),
    (r"\theta=90^\circ", "90"), ("29 °C", "29"), (r"(3,+\infty)", r"(3,\infty)"),
    (r"\begin{pmatrix}-\frac{1}{3}\\\frac53\end{pmatrix}", r"\begin{pmatrix} -1/3 \\ 5/3 \end{pmatrix}"),
    ("the answer is 42 (checked 7 ways).", "42"), ("So the answer must be 42. I tried 7.", "42"),
])
def test_words_signs_and_asides_around_a_value_do_not_hide_it(answer, gold):
    assert equivalent(final_answer(answer), gold)
