"""Signals and exit codes: how a run ends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import sys
import typing
from collections.abc import Iterator

import plot_run
from data import TrainingFailed, UserError
from harness.checkpoints import Saver, best_saved
from harness.files import strict_json
from harness.folder import Run


class Stopped(Exception):
    """A signal asked the run to end; raised between two phases."""


class Stop:
    """SIGINT or SIGTERM: the phase is finished and the run saved. A second one ends the process at once.

    While completions are scored nothing touches the run, and the first signal saves it at once: a scorer that hangs,
    ended by a second signal, loses no more than the step that it hangs in.
    """

    def __init__(self, save):
        self.signal, self.save, self.at_rest = 0, save, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.receive)

    def receive(self, number: int, _frame) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        os.write(2, b"\nstopping after this phase and saving; once more ends at once\n")
        with contextlib.suppress(Exception):  # the end of the phase saves again
            if self.at_rest:
                self.save()

    def check(self) -> None:
        if self.signal:
            raise Stopped

    @contextlib.contextmanager
    def scoring(self):
        self.at_rest = True
        try:
            yield
        finally:
            self.at_rest = False


@dataclasses.dataclass
class Ending:
    """How a run ends: its exit code and the status that summary.json gets."""

    code: int = 0
    status: str = "done"


@contextlib.contextmanager
def until_the_end(run: Run, saver: Saver, stop: Stop, queue, steps: int) -> Iterator[Ending]:
    """Within, the loop. Whatever ends it, the bar, the tracker and the workers (`queue`) are closed, what is whole is
    saved, and the summary and the pictures are made. A crash goes on as the exception that it is."""
    ending = Ending()
    run.log.open_bar(steps, saver.state.step)
    try:
        yield ending
    except Stopped:
        ending.code = 128 + stop.signal
        ending.status = f"stopped by {signal.Signals(stop.signal).name}; go on with --resume {run.folder}"
    except TrainingFailed as failed:
        ending.code, ending.status = 3, f"failed: {failed}"
    except Exception as error:
        with contextlib.suppress(TrainingFailed):
            if saver.whole:
                saver.save()
        finish(run, f"crashed: {type(error).__name__}: {error}")
        raise
    finally:
        run.log.close_bar()
        run.reporter.close()
        if queue:
            queue.close()
    if saver.whole and run.folder.is_dir():
        reason = saver.save_at_the_end()
        if reason:
            ending.code = 3
            ending.status = f"failed: the run could not be saved ({reason}), it was {ending.status}"
        elif ending.code == 0:
            saver.publish(last=True)
    finish(run, ending.status)


def finish(run: Run, status: str) -> None:
    """summary.json and the pictures: what a sweep reads, also of a run that was stopped or failed."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    keys = ("step", "reward_mean", "accuracy", "kl", "entropy", "length_mean")
    rows, evals = run.rows, run.evals
    summary = {
        "status": status,
        "steps": rows[-1]["step"] if rows else 0,
        "seconds": run.seconds(),
        "first": {key: rows[0].get(key) for key in keys} if rows else None,
        "last": {key: rows[-1].get(key) for key in keys} if rows else None,
        "first_eval": evals[0] if evals else None,
        "last_eval": evals[-1] if evals else None,
        "best_eval": best_saved(run),
        **run.saved,
        "peak_resident_gb": round(peak, 3),
    }
    try:
        run.write(run.folder / "summary.json", (strict_json(summary) + "\n").encode())
        plot_run.plot_run(run.folder)
    except Exception as error:  # a picture that fails must not fail the run that it shows
        run.log(f"the summary or the plots failed: {type(error).__name__}: {error}")
    run.log(f"{run.folder}: {status}")


def run_command(command) -> typing.NoReturn:
    """Run a command's main: a user's mistake is one sentence and exit code 2, a failed training 3."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # until the loop takes over: clean up, then end
    try:
        sys.exit(command())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except UserError as error:
        print("error:", *str(error).splitlines(), file=sys.stderr)
        sys.exit(2)
    except TrainingFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(3)
