"""Where a run's rows and weights go besides its folder: trackers, merged models, the hub. None of it can fail a run."""

from __future__ import annotations

import importlib.util
import json
import math
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch

from data import UserError

PUSH_SECONDS = 900  # a push that takes longer goes on beside the training


def check_packages(args) -> None:
    """What --report-to and --save-method need, before any model loads. UserError where it is missing."""
    packages = {"wandb": "wandb", "tensorboard": "tensorboard"}
    if args.report_to in packages and importlib.util.find_spec(packages[args.report_to]) is None:
        raise UserError(f"--report-to {args.report_to} needs its package: pip install {args.report_to}")
    if args.save_method == "merged_4bit" and not (
            torch.cuda.is_available() and importlib.util.find_spec("bitsandbytes") is not None):
        raise UserError("--save-method merged_4bit needs a CUDA device and the bitsandbytes package; use merged_16bit")


class Reporter:
    """The numbers of each row as wandb or TensorBoard scalars, under the names that metrics.csv has."""

    def __init__(self, args, folder: Path, config: dict[str, Any], step: int, log):
        self.log, self.send, self.end = log, None, lambda: None
        try:
            if args.report_to == "wandb":
                import wandb

                mark = folder / "wandb-id"  # of this folder, so that a resume goes on in the same place
                if not mark.exists():
                    mark.write_text(secrets.token_hex(4))
                run = wandb.init(project="train_grpo", name=folder.name, id=mark.read_text(), dir=str(folder),
                                 config=config, resume="allow")
                self.send, self.end = lambda row, step: run.log(row, step=step), run.finish
            elif args.report_to == "tensorboard":
                from torch.utils.tensorboard import SummaryWriter

                writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
                self.send, self.end = lambda row, step: [
                    writer.add_scalar(name, value, step) for name, value in row.items()], writer.close
        except Exception as error:  # no login, no network, a broken installation: the run has its own folder
            log(f"--report-to {args.report_to} is off: {type(error).__name__}: {str(error)[:200]}")

    def send_row(self, row: dict[str, Any]) -> None:
        numbers = {name: float(value) for name, value in row.items()
                   if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)}
        try:
            if self.send:
                self.send(numbers, int(row["step"]))
        except Exception as error:
            self.log(f"reporting is off from step {row['step']}: {type(error).__name__}: {str(error)[:200]}")
            self.send = None

    def close(self) -> None:
        try:
            self.end()
        except Exception as error:
            self.log(f"reporting could not be closed: {type(error).__name__}: {str(error)[:200]}")


def write_model(policy, adapter: Path, folder: Path, method: str) -> None:
    """The policy as one model in `folder`: bfloat16, or nf4 on top of that. `adapter` is its newest checkpoint."""
    part = folder.with_name(f".{folder.name}.part")  # an earlier model stays until this one is whole
    shutil.rmtree(part, ignore_errors=True)
    policy.save_merged(part, adapter, torch.bfloat16)
    if method == "merged_4bit":
        policy.quantise(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def push(run: Path, source: Path, repo: str, step: int, log) -> None:
    """Uploads a folder to a hub repository; hub.jsonl in the run's folder gets the step, the commit, or the error."""
    def work() -> None:
        record: dict[str, Any] = {"step": step, "repo": repo, "what": source.name, "time": time.time()}
        try:
            import huggingface_hub

            huggingface_hub.create_repo(repo, exist_ok=True, private=True)
            done = huggingface_hub.upload_folder(repo_id=repo, folder_path=str(source), path_in_repo=source.name,
                                                 commit_message=f"step {step}")
            record["commit"] = getattr(done, "oid", None) or str(done)
            log(f"pushed {source.name} to {repo}, commit {record['commit']}")
        except Exception as error:  # no token, no network, no rights: the weights are in the run's folder
            record["error"] = f"{type(error).__name__}: {str(error).strip()[:300]}"
            log(f"the push to {repo} failed ({record['error']}); the run goes on")
        with (run / "hub.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PUSH_SECONDS)
    if thread.is_alive():
        log(f"the push to {repo} takes long and goes on beside the training")


def publish(policy, run: Path, checkpoint: Path, step: int, last: bool, log) -> None:
    """After a save: the pushes; after the last one the merged model in model/ (else the checkpoint is the model)."""
    args = policy.args
    if args.hub_checkpoint_repo:
        push(run, checkpoint, args.hub_checkpoint_repo, step, log)
    if not last:
        return
    model = checkpoint
    if args.save_method.startswith("merged_"):
        try:
            write_model(policy, checkpoint, run / "model", args.save_method)
            model = run / "model"
            log(f"the merged model ({args.save_method}) is in {model}")
        except Exception as error:  # memory, disk: the checkpoint is there and can be merged by hand
            log(f"--save-method {args.save_method} failed ({type(error).__name__}: {str(error)[:200]}); the weights "
                f"are in {checkpoint}")
    if args.push_to_hub:
        push(run, model, args.push_to_hub, step, log)
