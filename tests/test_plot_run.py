"""Pictures of runs that are whole, short, torn, dead, still growing or not there; one property a test."""

import json
import math
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import plot_run as pr  # noqa: E402

FEW = "step,reward_mean,loss,kl,eval_accuracy".split(",")
ALL = (
    "step,reward_mean,reward_std,part_correct,part_format,accuracy,groups_used,groups_constant,groups_dropped,"
    "length_mean,length_max,truncated_share,loss,policy_loss,kl,entropy,clip_low_share,clip_high_share,grad_norm,"
    "seconds_rollout,seconds_score,seconds_update,seconds_eval,tool_calls,eval_accuracy"
).split(",")


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    """Few pixels, to be fast."""
    monkeypatch.setitem(pr.STYLE, "savefig.dpi", 30)


def line(step, columns=FEW, **values):
    """One line of a metrics.csv, every column a number that tells its step, but for what is given."""
    row = dict.fromkeys(columns, 0.01 * step) | {"step": step, "eval_accuracy": ""} | values
    return ",".join(str(row[name]) for name in columns) + "\n"


def make_run(folder, lines, evals="", columns=FEW):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.csv").write_text(",".join(columns) + "\n" + "".join(lines))
    if evals:
        (folder / "eval.jsonl").write_text(evals)
    return folder


def command(*args, cwd):
    """The command in a process of its own."""
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True)


def refusal(capsys, *args):
    """The one sentence of a refused command."""
    with pytest.raises(SystemExit) as stop:
        pr.main([str(arg) for arg in args])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err


def labelled(ax):
    """The strong lines of a panel, without the light ones under them."""
    return [drawn for drawn in ax.get_lines() if not drawn.get_label().startswith("_")]


# Reading


def test_torn_last_line_is_ignored(tmp_path):
    run = pr.read_run(make_run(tmp_path / "a", [line(1), line(2), line(3)[:-1]]))
    assert run.columns["step"] == [1, 2]


def test_torn_json_line_is_ignored(tmp_path):
    run = pr.read_run(make_run(tmp_path / "a", [line(1)], '{"step": 0, "accuracy": 0.5}\n{"step": 1, "accu'))
    assert run.series("eval_accuracy") == ([0], [0.5], [0])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)
@given(cut=st.integers(0, 2000), noise=st.binary(max_size=20))
def test_any_torn_file_gives_its_whole_rows(tmp_path, cut, noise):
    folder = make_run(tmp_path / "a", [line(step) for step in range(1, 6)])
    whole = (folder / "metrics.csv").read_bytes()
    header, kept = whole.index(b"\n") + 1, whole[:cut]
    (folder / "metrics.csv").write_bytes(kept + noise.replace(b"\n", b"").replace(b"\r", b""))
    if cut < header:
        with pytest.raises(ValueError, match="is empty"):
            pr.read_run(folder)
    else:
        assert pr.read_run(folder).columns["step"] == list(range(1, kept.count(b"\n")))


def test_a_line_torn_in_the_middle_costs_only_itself(tmp_path):
    run = pr.read_run(make_run(tmp_path / "a", [line(1), '2,"0.3' + line(3), line(4)]))
    assert run.columns["step"] == [1, 4]


def test_last_row_of_a_step_wins(tmp_path):
    lines = [line(1), line(2, kl=5), line(3), line(2, kl=7)]
    run = pr.read_run(make_run(tmp_path / "a", lines))
    assert run.columns["step"] == [1, 2, 3] and run.columns["kl"] == [0.01, 7, 0.03]


@pytest.mark.parametrize("gap", ["", "nan", "inf", "-inf", "None", "1e999", "text"])
def test_what_is_no_number_leaves_a_gap(tmp_path, gap):
    lines = [line(1), line(2), line(3, loss=gap), line(4), line(5)]
    run = pr.read_run(make_run(tmp_path / "a", lines))
    assert run.columns["loss"][2] is None
    figure = pr.draw_figure([run], [pr.Panel("loss", {"loss": "loss"})])
    assert [math.isnan(y) for y in labelled(figure.axes[0])[0].get_ydata()] == [False, False, True, False, False]


def test_evaluations_come_from_eval_jsonl_with_step_0(tmp_path):
    evals = '{"step": 0, "accuracy": 0.1, "task": "x"}\n{"step": 2, "accuracy": 0.3, "per_level": {}}\n'
    run = pr.read_run(make_run(tmp_path / "a", [line(1), line(2, eval_accuracy=0.9)], evals))
    assert run.series("eval_accuracy")[:2] == ([0, 2], [0.1, 0.3])


def test_evaluations_come_from_the_csv_without_eval_jsonl(tmp_path):
    lines = [line(1, eval_accuracy=0.1), line(2), line(3), line(4, eval_accuracy=0.3)]
    run = pr.read_run(make_run(tmp_path / "a", lines))
    assert run.series("eval_accuracy")[:2] == ([1, 4], [0.1, 0.3])


def test_smoothing_starts_at_the_first_value_and_keeps_a_constant():
    assert pr.smoothed([3.0, None, 3.0], 0.9) == pytest.approx([3, math.nan, 3], nan_ok=True)
    assert pr.smoothed([1.0, 5.0], 0.0) == [1, 5]


# Pictures


def test_standard_pictures_of_a_run(tmp_path):
    columns = ["step", "reward_mean", "accuracy", "part_correct", "loss", "tool_calls"]
    paths = pr.plot_run(make_run(tmp_path / "a", [line(step, columns) for step in (1, 2, 3)], columns=columns))
    assert [path.stem for path in paths] == ["overview", "reward", "accuracy", "parts", "loss", "task"]
    assert sorted(path.name for path in (tmp_path / "a" / "plots").iterdir()) == sorted(path.name for path in paths)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_task_panels_hold_what_the_trainer_does_not_know_with_its_evaluation(tmp_path):
    columns = ["step", "kl", "truncated_share", "calls", "eval_calls", "eval_truncated_share", "eval_other", "part_a"]
    run = pr.read_run(make_run(tmp_path / "a", [line(1, columns)], columns=columns))
    drawn = [[name for name in panel.columns if run.series(name)[0]] for panel in pr.standard(run)["task"]]
    assert drawn == [["calls", "eval_calls"], ["eval_other"]]


def test_header_only_has_no_pictures_and_does_not_raise(tmp_path):
    assert pr.plot_run(make_run(tmp_path / "a", [])) == []


def test_only_the_initial_evaluation_is_drawn(tmp_path):
    folder = make_run(tmp_path / "a", [], '{"step": 0, "accuracy": 0.5}\n')
    figure = pr.draw_figure([pr.read_run(folder)], pr.standard(pr.read_run(folder))["overview"])
    assert [ax.get_ylabel() for ax in figure.axes] == ["accuracy"]


@pytest.mark.parametrize("rows", [1, 2])
def test_every_value_of_a_short_run_can_be_seen(tmp_path, rows):
    run = pr.read_run(make_run(tmp_path / "a", [line(step, ALL) for step in range(1, rows + 1)], columns=ALL))
    figure = pr.draw_figure([run], pr.standard(run)["overview"])
    for drawn in (drawn for ax in figure.axes for drawn in labelled(ax)):
        assert len(drawn.get_xdata()) == rows and (rows > 1 or drawn.get_marker() == "o")


def test_columns_without_a_value_get_no_panel(tmp_path):
    run = pr.read_run(make_run(tmp_path / "a", [line(1, loss="", kl=""), line(2, loss="nan", kl="")]))
    figure = pr.draw_figure([run], [pr.PANELS["loss"], pr.PANELS["reward"]])
    assert [ax.get_ylabel() for ax in figure.axes] == ["reward"]


def test_all_columns_blank_is_no_picture(tmp_path):
    blank = dict.fromkeys(FEW[1:], "nan")
    assert pr.plot_run(make_run(tmp_path / "a", [line(1, **blank), line(2, **blank)])) == []


def test_extreme_values_and_odd_names_are_drawn(tmp_path):
    (tmp_path / "_$a").mkdir()
    text = "step,loss,kl,reward_mean,reward_std,_t^$\n1,1e99,1e-300,-1e99,1e99,1\n2,-1e99,1e90,1e99,0,2\n"
    (tmp_path / "_$a" / "metrics.csv").write_text(text)
    run = pr.read_run(tmp_path / "_$a")
    pr.draw_figure([run], [pr.PANELS["reward"], pr.PANELS["loss"], *pr.standard(run)["task"]]).draw_without_rendering()


@pytest.mark.parametrize(
    ("values", "scale"),
    [((0, 1e-5, 1e-4, 1e-2), "log"), ((0.01, 0.02, 0.03), "linear"), ((-1e-5, 1e-5, 1), "linear"), ((0, 0), "linear")],
)
def test_kl_is_on_a_log_scale_only_over_decades_above_zero(tmp_path, values, scale):
    run = pr.read_run(make_run(tmp_path / "a", [line(i + 1, kl=kl) for i, kl in enumerate(values)]))
    assert pr.draw_figure([run], [pr.Panel("KL", {"kl": "kl"})]).axes[0].get_yscale() == scale


def test_overlay_has_one_line_per_run_per_panel(tmp_path):
    names = ["_a", "b", "c"]
    runs = [pr.read_run(make_run(tmp_path / name, [line(1), line(2), line(3)])) for name in names]
    figure = pr.draw_figure(runs, [pr.Panel(name, {name: name}) for name in ("reward_mean", "kl")])
    for ax in figure.axes:
        assert len(labelled(ax)) == 3 and len({drawn.get_color() for drawn in labelled(ax)}) == 3
    assert [text.get_text().strip("\u200a") for text in figure.legends[0].get_texts()] == names


def test_a_run_keeps_its_colour_where_another_lacks_the_metric(tmp_path):
    folders = [make_run(tmp_path / str(kl), [line(1, kl=kl), line(2, kl=kl)]) for kl in ("nan", 1)]
    runs = [pr.read_run(folder) for folder in folders]
    figure = pr.draw_figure(runs, [pr.Panel(name, {name: name}) for name in ("kl", "loss")])
    assert [[drawn.get_color() for drawn in labelled(ax)] for ax in figure.axes] == [pr.COLOURS[1:2], pr.COLOURS[:2]]


def test_a_failed_write_leaves_the_old_picture_and_nothing_else(tmp_path, monkeypatch):
    run = pr.read_run(make_run(tmp_path / "a", [line(1), line(2)]))
    (tmp_path / "x.png").write_text("old")

    def half(self, path, **_):
        Path(path).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pr.Figure, "savefig", half)
    with pytest.raises(OSError, match=r"cannot write .*x\.png: No space left"):
        pr.save(pr.draw_figure([run], [pr.PANELS["loss"]]), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_text() == "old" and len(list(tmp_path.iterdir())) == 2


def test_a_run_can_be_drawn_while_it_is_written(tmp_path):
    folder = make_run(tmp_path / "a", [line(1), line(2)])
    done = threading.Event()

    def write():
        with open(folder / "metrics.csv", "a") as file:
            for step in range(3, 100_000):
                for piece in (line(step)[:40], line(step)[40:]):
                    file.write(piece)
                    file.flush()
                if done.wait(0.0005):
                    return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20):
            columns = pr.read_run(folder).columns
            assert columns["step"] == list(range(1, len(columns["step"]) + 1))
            assert columns["kl"] == [float(str(0.01 * step)) for step in columns["step"]]
        assert pr.plot_run(folder)
    finally:
        done.set()
        writer.join()


# The command


def test_one_run_prints_the_paths_of_its_pictures(tmp_path):
    make_run(tmp_path / "runs" / "a", ["1,0.5\n", "2,0.6\n"], columns=["step", "reward_mean"])
    result = command(ROOT / "plot_run.py", "runs/a", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.split() == ["runs/a/plots/overview.png", "runs/a/plots/reward.png"]


def test_missing_folder_is_one_sentence_without_traceback(tmp_path):
    result = command(ROOT / "plot_run.py", "runs/nothing", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "plot_run: there is no run folder runs/nothing.\n"


def test_import_brings_neither_torch_nor_pyplot():
    code = "import sys, plot_run; print({'torch', 'matplotlib.pyplot', 'pandas'} & sys.modules.keys())"
    assert command("-c", code, cwd=ROOT).stdout == "set()\n"


def test_several_runs_are_compared_in_the_current_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / name, [line(1), line(2)])
    pr.main(["a", "b"])
    assert capsys.readouterr().out == "comparison.png\n" and (tmp_path / "comparison.png").is_file()


def test_runs_of_one_name_are_told_apart_by_their_parents(tmp_path, capsys):
    folders = [make_run(tmp_path / parent / "a", [line(1)]) for parent in ("x", "y")]
    pr.main([*map(str, folders), str(folders[0]), "--list"])
    assert {said.split()[0] for said in capsys.readouterr().out.splitlines()} == {"x/a", "y/a"}


def test_patterns_choose_metrics(tmp_path):
    panels = pr.choose(["part_*", "kl"], ["kl", "part_a", "part_b", "loss"])
    assert [name for panel in panels for name in panel.columns] == ["part_a", "part_b", "kl"]


def test_unknown_metric_names_the_nearest(tmp_path, capsys):
    folder = make_run(tmp_path / "a", [line(1)])
    assert "near it: reward_mean" in refusal(capsys, folder, "--metrics", "kl,reward_maen")


def test_a_folder_of_runs_lists_them(tmp_path, capsys):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name, [line(1)])
    said = refusal(capsys, tmp_path / "runs")
    assert "not a run folder" in said and str(tmp_path / "runs" / "a") in said and str(tmp_path / "runs" / "b") in said


@pytest.mark.parametrize(("out", "reason"), [("x.xyz", "ends in .png"), ("x", "ends in .png"), ("no/x.png", "No such")])
def test_output_that_cannot_be_written(tmp_path, capsys, out, reason):
    said = refusal(capsys, make_run(tmp_path / "a", [line(1)]), "--metrics", "kl", "-o", tmp_path / out)
    assert reason in said and str(tmp_path / out) in said


def test_nothing_logged_yet_is_said(tmp_path, capsys):
    assert "nothing to draw" in refusal(capsys, make_run(tmp_path / "a", []))
    assert "nothing to draw" in refusal(capsys, tmp_path / "a", "-o", tmp_path / "x.png")
    (tmp_path / "a" / "metrics.csv").write_text("")
    assert "is empty" in refusal(capsys, tmp_path / "a")


@pytest.mark.parametrize("smooth", ["1", "-0.1", "nan"])
def test_smooth_out_of_range(tmp_path, capsys, smooth):
    assert "--smooth" in refusal(capsys, make_run(tmp_path / "a", [line(1)]), f"--smooth={smooth}")


def test_a_half_written_config_is_no_hindrance(tmp_path):
    folder = make_run(tmp_path / "a", [line(1)], json.dumps({"step": 0}) + "\n[1]\n3\nnull\n")
    (folder / "config.json").write_text('{"args": {"lr"')
    assert pr.read_run(folder).columns["step"] == [1]


def test_a_text_column_of_phases_marks_its_changes(tmp_path):
    columns = [*FEW, "phase"]
    names = ["GROUNDED", "GROUNDED", "RAMP", "RAMP", "CONTINUOUS"]
    lines = [line(i, columns, phase=name) for i, name in enumerate(names, 1)]
    run = pr.read_run(make_run(tmp_path / "run", lines, columns=columns))
    assert run.phases == {1: "GROUNDED", 3: "RAMP", 5: "CONTINUOUS"}
    figure = pr.draw_figure([run], [pr.PANELS["reward"]])
    assert {text.get_text() for text in figure.axes[0].texts} == {"grounded", "ramp", "continuous"}
    assert pr.read_run(make_run(tmp_path / "plain", [line(1), line(2)])).phases == {}


def test_curves_of_the_last_evaluation_are_drawn_on_the_axes_of_the_dots(tmp_path):
    def record(step, height):
        curve = {"title": f"at {step} $5", "x_label": "t", "x": [0, 1], "points": {"x": [1, 2], "y": [0, 3]},
                 "lines": {"x": [1, height], "y": [None, "nan"]}}
        return json.dumps({"step": step, "answers": [{"curves": curve}, {"text": "no curves"}]}) + "\n"

    folder = make_run(tmp_path / "a", [line(1)], record(0, 2) + record(1, 1e30) + record(2, 9)[:40])
    run = pr.read_run(folder)
    (ax,) = pr.draw_curves(run).axes
    assert ax.get_title() == r"at 1 \$5" and -1 < ax.get_ylim()[0] < 0 and 3 < ax.get_ylim()[1] < 4
    assert len(ax.get_lines()) == 4 and [text.get_text() for text in ax.get_legend().get_texts()] == ["x", "y"]
    assert folder / "plots" / "curves.png" in pr.plot_run(folder)
    assert pr.draw_curves(pr.read_run(make_run(tmp_path / "b", [line(1)]))) is None


def test_capability_and_faithfulness_share_a_picture_where_a_judge_was_asked(tmp_path):
    judged = [{"step": step, "fve": 0.2 * step, "hallucinations": 4 - step, "clean_rate": None} for step in (0, 2)]
    folder = make_run(tmp_path / "a", [line(1), line(2)], "".join(json.dumps(record) + "\n" for record in judged))
    assert folder / "plots" / "capability_vs_faithfulness.png" in pr.plot_run(folder)
    run = pr.read_run(folder)
    (ax,) = pr.draw_figure([run], pr.standard(run)["capability_vs_faithfulness"]).axes
    lines = {drawn.get_label(): list(drawn.get_ydata()) for drawn in labelled(ax)}
    assert lines == {"fve × 100": [0, 40], "hallucinations × 10": [40, 20]}
    alone = make_run(tmp_path / "b", [line(1)], '{"step": 0, "fve": 0.1}\n')
    assert pr.standard(pr.read_run(alone))["capability_vs_faithfulness"] == []


def test_many_parts_are_spread_over_panels_and_the_largest_come_first(tmp_path):
    names = [f"part_p{i}" for i in range(20)]
    rows = [",".join([str(step), *(str(i / 10) for i in range(20))]) + "\n" for step in (1, 2)]
    run = pr.read_run(make_run(tmp_path / "a", rows, columns=["step", *names]))
    panels = pr.standard(run)
    assert [list(panel.columns.values()) for panel in panels["parts"]] == [
        [f"p{i}" for i in span] for span in (range(19, 11, -1), range(11, 3, -1), range(3, -1, -1))]
    assert panels["parts"][0] in panels["overview"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pr.plot_run(tmp_path / "a")
