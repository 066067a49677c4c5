"""Breaks runs at random moments, resumes them, and compares the end with that of runs that were left alone.

    python tests/chaos.py --kills 30 --seed 0                     # random small models, full and LoRA
    python tests/chaos.py --kills 10 --preset math smoke -- --steps 12 --save-every 4

A process is forked for each attempt (every tenth is a fresh interpreter, killed after a random time). In it, at the
n-th of all the events that it passes (a phase begins, a file is written, synced, renamed, removed), one of these
happens: SIGKILL, with half of the file's bytes written where the event is a write; SIGTERM; SIGINT and SIGTERM at
once; a disk that refuses the next three writes. Then the run is resumed, to be broken again. What is compared, byte
for byte but for times: metrics.csv, metrics.jsonl, eval.jsonl, completions, the last checkpoint, checkpoints/best.
"""

from __future__ import annotations

import argparse
import collections
import errno
import faulthandler
import gc
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import typing
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from conftest import CHAT, ROOT, WORDS_TASK, random_model, word_tokenizer

import engine.logps
import engine.rollout
import harness.checkpoints
import harness.stop
import models.optimizer
import models.policy
import plot_run
import train_grpo

TIMES = {"time", "seconds_rollout", "seconds_score", "seconds_update", "seconds_eval", "tokens_per_second",
         "peak_memory_gb", "seconds"}
STEPS = ["--steps", "7", "--save-every", "2", "--eval-every", "3", "--warmup-steps", "2"]
VARIANTS = {
    "full, inner epochs": ["--beta", "0.1", "--inner-epochs", "2", "--minibatches", "2", "--off-policy", "truncate"],
    "LoRA, dynamic sampling": ["--adapter", "lora", "--beta", "0.1", "--lr", "1e-2", "--dynamic-sampling", "2",
                               "--min-group-std", "0.2", "--temperature-end", "0.5"],
    "full, running mean": ["--advantage", "mixed", "--mixed-std", "0.2", "--mixed-fallback", "baseline",
                           "--eval-k", "2"],
}
DIFFICULT = WORDS_TASK + '''

class Chosen(Words):
    """Words that come again the more often, the nearer their win rate is to a half."""

    def __init__(self, args):
        super().__init__(args)
        train = [Prompt(f"w{3 + i} w{4 + i % 5}") for i in range(12)]
        self.set_prompts(train, [Prompt(f"w{20 + i} w5 w7") for i in range(4)], alpha=2.0)

    def prompts(self, n):
        return [self.train[i] for i in self.sampler.draw(n)]

    def heldout(self):
        return self.heldout_prompts

    def observe(self, groups):
        for group in groups:
            wins = [score.flags["correct"] for score in group.scores]
            self.sampler.record(group.prompt.meta["index"], len(wins), sum(wins))
        return super().observe(groups)
'''


# ---- what happens inside a process
class Events:
    """Counts what a process passes and acts at one of them; the place is written to `log`."""

    def __init__(self, at: int, act: str, log: Path, refuses: int = 3):
        self.count, self.at, self.act, self.log, self.refuses, self.refusals = 0, at, act, log, refuses, 0

    def __call__(self, place: str, half=None, disk: bool = False) -> None:
        """`half` writes half of what the event is about; `disk`: the event can be refused."""
        self.count += 1
        if self.count == self.at:
            self.log.write_text(place)
            if self.act == "kill":
                if half:
                    half()
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.act in ("term", "twice"):
                if self.act == "twice":
                    os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGTERM)
            elif self.act == "full":
                self.refusals = self.refuses
        if disk and self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Watched:
    """An open file whose writes are events."""

    def __init__(self, file, events: Events, name: str):
        self.file, self.events, self.name = file, events, name

    def write(self, data):
        self.events(f"write of {self.name}", lambda: (self.file.write(data[: len(data) // 2]), self.file.flush()), True)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def general(name: str) -> str:
    """A file's name without its number: places of one kind are counted together."""
    return "".join("N" if c.isdigit() else c for c in str(name)).replace("NN", "N")


def watch(events: Events) -> None:
    """Make events of this process's phases and of all that it does to the disk."""
    def before(owner, name, disk=False, after=False):
        real = getattr(owner, name)

        def watched(*given, **named):
            what = general(Path(given[0]).name) if given and isinstance(given[0], str | os.PathLike) else ""
            events(f"{name} {what}".strip(), disk=disk)
            result = real(*given, **named)
            if after:
                events(f"after {name}")
            return result

        setattr(owner, name, watched)

    for name in ("fsync", "rename", "replace", "mkdir"):
        before(os, name, disk=True)
    for name in ("unlink", "rmdir"):
        before(os, name)
    before(torch, "save", after=True)
    before(models.policy.Policy, "save", after=True)
    for name in "load_policy load_checkpoint evaluate_and_log set_advantages judge step_metrics".split():
        before(train_grpo, name, after=True)
    before(models.policy, "rollout", after=True)
    before(harness.stop, "finish", after=True)
    before(engine.rollout.TurnBuffer, "sample")
    before(train_grpo, "micro_loss", after=True)
    before(models.optimizer.Optimizer, "step", after=True)
    real_open, real_text = Path.open, Path.write_text

    def watched_open(path, mode="r", *given, **named):
        file = real_open(path, mode, *given, **named)
        return Watched(file, events, general(path.name)) if mode in ("ab", "wb") else file

    def write_text(path, text, *given, **named):
        events(f"write of {general(path.name)}", lambda: real_text(path, text[: len(text) // 2]), True)
        return real_text(path, text, *given, **named)

    Path.open, Path.write_text = watched_open, write_text


def end_in_child(work, files=(), after=lambda: None) -> typing.NoReturn:
    """`work` as the whole rest of a forked child, which ends here with its exit code, 70 for a crash; what it says goes
    to `files`: one for stdout, one for stderr (or, without any, where it went before)."""
    code = 70
    gc.freeze()  # else every fork collects what the libraries left, for a second
    try:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        if files:
            sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
            faulthandler.enable(2)
        work()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        after()
        os._exit(code)


def exit_code(child: int, seconds: float = 500) -> int:
    """A child's exit code, negative where a signal ended it. TimeoutError, with the child killed, where it hangs; its
    threads' stacks are then in what it wrote."""
    until = time.monotonic() + seconds
    while (found := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGABRT)
            time.sleep(1)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError(f"process {child} had not ended after {seconds:g} s")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(found[1])


def child_main(flags: list[str], output: Path | None, prepare=lambda: None, after=lambda: None) -> typing.NoReturn:
    """The command, without pictures, as the whole rest of a forked child."""
    def work() -> None:
        plot_run.plot_run = lambda folder: []
        prepare()
        harness.stop.run_command(lambda: train_grpo.main([str(word) for word in flags]))

    end_in_child(work, (output, output) if output else (), after)


def forked(flags: list[str], at: int, act: str, folder: Path) -> tuple[int, int, str]:
    """Run the command in a fork: (exit code, events passed, where something was done). A negative code: a signal."""
    place, counted = folder / "place", folder / "counted"
    place.unlink(missing_ok=True)
    events = Events(at, act, place)
    child = os.fork()
    if child == 0:
        child_main(flags, folder / "output", lambda: watch(events), lambda: counted.write_bytes(b"%d" % events.count))
    code = exit_code(child)
    passed = int(counted.read_text()) if code >= 0 and counted.exists() else at
    return code, passed, place.read_text() if place.exists() else ""


def fresh(flags: list[str], seconds: float, folder: Path) -> tuple[int, str]:
    """Run the command in a new interpreter and kill it after some seconds."""
    with (folder / "output").open("ab") as output:
        process = subprocess.Popen([sys.executable, str(ROOT / "train_grpo.py"), *flags], stdout=output, stderr=output)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait(), f"{seconds:.1f} s after the start of an interpreter"


# ---- what is compared
def left_by(run: Path) -> dict[str, object]:
    """All that a run leaves but times: equal for equal runs."""
    def plain(record: dict) -> dict:
        return {name: value for name, value in record.items() if name not in TIMES}

    rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    found: dict[str, object] = {"metrics.csv": [plain(dict(zip(rows[0], row, strict=True))) for row in rows]}
    for path in [run / "metrics.jsonl", run / "eval.jsonl"]:
        found[path.name] = [plain(json.loads(line)) for line in path.read_text().splitlines()]
    for path in (run / "completions").iterdir():
        found[path.name] = gzip.decompress(path.read_bytes())
    newest = harness.checkpoints.checkpoints(run)[0]
    for folder in (newest, run / "checkpoints" / "best"):
        assert harness.checkpoints.is_whole(folder), folder
        for path in (p for p in folder.iterdir() if p.name != "manifest.json"):
            key = f"{folder.name}/{path.name}"
            found[key] = plain(json.loads(path.read_text())) if path.name == "state.json" else path.read_bytes()
    found["half files"] = [str(path.relative_to(run)) for path in run.rglob(".*")]
    return found


def differences(whole: Path, broken: Path) -> list[str]:
    a, b = left_by(whole), left_by(broken)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


# ---- the campaign
ACTS = {"kill": (-signal.SIGKILL,), "term": (143, 0), "twice": (130, 143), "full": (0, 1, 2, 3)}


def campaign(name: str, flags: list[str], kills: int, rng: random.Random, folder: Path, tally: collections.Counter
             ) -> list[str]:
    """Break runs of one kind `kills` times; returns a sentence for each mismatch."""
    folder.mkdir()
    code, events, _ = forked([*flags, "--out", str(folder), "--name", "whole"], 0, "", folder)
    assert code == 0, (folder / "output").read_text()[-3000:]
    wrong, number, done, ended = [], 1, 0, True
    while done < kills or not ended:  # and the last run that was broken is brought to its end
        run = folder / f"broken{number}"
        command = ["--resume", str(run)] if run.exists() else [*flags, "--out", str(folder), "--name", run.name]
        if done >= kills:
            code, place, act = forked(command, 0, "", folder)[0], "", "to its end"
        elif done % 10 == 9:
            code, place = fresh(command, rng.uniform(0.2, 12), folder)
            act = "kill"
        else:
            act = rng.choices(list(ACTS), [7, 1, 1, 1])[0]
            code, _, place = forked(command, rng.randint(1, max(2, 2 * events // 3)), act, folder)
        done += bool(place)
        if place:
            tally[f"{act}: {place if 'after the start' not in place else 'at a random time'}"] += 1
            print(f"  {name}: {act} {place} -> {code}", flush=True)
        allowed = {0} if not place else {0, *ACTS[act]}
        ended = code == 0
        if code not in allowed:
            return [*wrong, f"{name}: {act} {place} ended with {code}: {(folder / 'output').read_text()[-1500:]}"]
        if ended:
            unequal = differences(folder / "whole", run)
            wrong += [f"{name}: {run} differs in {', '.join(unequal)}"] if unequal else []
            number += 1
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="how often runs are broken, in all [30]")
    parser.add_argument("--seed", type=int, default=0, help="of the moments [0]")
    parser.add_argument("--preset", nargs="+", default=[], help="break runs of these presets instead")
    parser.add_argument("--keep", action="store_true", help="leave the runs where they are")
    parser.add_argument("flags", nargs="*", help="after --: further flags of train_grpo.py")
    args = parser.parse_args(argv)
    began, rng, tally, wrong = time.monotonic(), random.Random(args.seed), collections.Counter(), []
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    if args.preset:
        kinds = {" ".join(args.preset): ["--preset", *args.preset, *args.flags]}
    else:
        tokenizer = word_tokenizer()
        tokenizer.chat_template = CHAT
        random_model().save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        (folder / "words.py").write_text(DIFFICULT)
        base = ["--task", f"{folder / 'words.py'}:Chosen", "--model", str(folder / "model"), "--adapter", "none",
                "--beta", "0", "--lr", "1e-3", "--prompts", "2", "--group", "4", "--max-new", "5", "--overlong", "keep"]
        kinds = {name: [*base, *STEPS, *more, *args.flags] for name, more in VARIANTS.items()}
    for i, (name, flags) in enumerate(kinds.items()):
        kills = args.kills // len(kinds) + (i < args.kills % len(kinds))
        wrong += campaign(name, flags, kills, rng, folder / f"kind{i}", tally) if kills else []
    print(*(f"{count:4} x {what}" for what, count in sorted(tally.items())), *wrong, sep="\n")
    print(f"{tally.total()} faults, {len(wrong)} mismatches, {time.monotonic() - began:.0f} s")
    if args.keep:
        print(f"kept in {folder}")
    else:
        shutil.rmtree(folder)
    return min(1, len(wrong))


if __name__ == "__main__":
    sys.exit(main())
