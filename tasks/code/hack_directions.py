"""Directions in which the policy learns to hack, and the projection that takes them out of its gradient.

For each module with an SVD adapter, the gradient of a completion's mean log-likelihood with respect to δ, hacked minus
honest, one row a pair; the top right singular vectors of these rows span where hacking lies. After a step's gradients
are whole, the part of the update that goes along them towards the hack is removed (arm `projected`), measured only
(`vanilla`), or as many random directions take their place (`random`, the control). --hack-refresh extracts them again
from the policy as it has become.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from data import Prompt, UserError, rng_of, seed_of
from harness.files import cache_home
from models.svd import SVDModel, read_header, write_tensors

SCHEMA = "1"


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    arm: Literal["vanilla", "projected", "random"] = "vanilla"  # measure, remove, or remove as many random directions
    hack_directions: str = ""  # file of directions; missing: extracted at the start; empty: in the user's cache folder
    hack_k: int = 5  # directions a module
    hack_drop: float = 0.25  # leave out directions whose singular value is in this lowest quantile of all modules'
    hack_heldout: int = 4  # pairs that are not extracted from, for the reported cosine
    hack_refresh: int = 0  # steps after which the directions are extracted again, from the policy as it is; 0: never
    hack_gate: Literal["one_sided", "no_gate"] = "one_sided"  # remove what goes towards the hack, or either way
    preserve_magnitude: bool = False  # scale what is left of a module's gradient back to its old norm


class Study:
    """The directions of a run, the projection, and what is logged of them. Idle without an SVD adapter."""

    columns = {
        "cin": "share of the gradient's energy along the hack directions, before the projection",
        "cin_s": "the same of the live rollouts' gradient (--split-every)",
        "cin_t": "the same of the cached rollouts' gradient (--split-every)",
        "cout": "share of the gradient's energy along the hack directions, after the projection",
        "fired": "share of modules where something was (vanilla: would be) removed",
        "adam_leak": "share of the optimizer's own step that still goes towards the hack",
        "pairs_cosine": "mean cosine of held-out pairs with the mean of those that the directions come from",
    }

    def __init__(self, args, pairs: Callable[[], list[dict]]):
        if args.hack_k < 1 or not 0 <= args.hack_drop < 1 or args.hack_heldout < 1:
            raise UserError("--hack-k and --hack-heldout must be 1 or more, --hack-drop from 0 to below 1")
        if args.hack_refresh < 0:
            raise UserError("--hack-refresh must be 0 or more")
        self.args = args
        self.pairs = pairs
        self.basis: dict[str, Tensor] = {}  # module -> (k, r), orthonormal rows that point towards the hack
        self.before: dict[str, Tensor] = {}  # every δ before the optimizer's step
        self.policy = None
        self.steps = 0  # so far
        self.saved = ""  # the basis since the last refresh, as text
        self.parts: list[dict[str, Tensor]] = []  # the gradients after each source of a split backward
        self.cosine = 0.0

    def prepare(self, policy, log=print) -> None:
        """Load the directions, or extract them from the pairs with the model as it is (δ = 0)."""
        if not isinstance(policy.model, SVDModel):
            if self.args.arm != "vanilla":
                raise UserError(f"--arm {self.args.arm} works on the SVD adapter; add --adapter svd")
            return
        self.policy = policy
        pairs = self.pairs()
        used = len(pairs) - self.args.hack_heldout
        if used < self.args.hack_k:
            raise UserError(f"--hack-k {self.args.hack_k} is more than the {len(pairs)} pairs without the "
                            f"--hack-heldout {self.args.hack_heldout} give")
        tensors = self._read_or_extract(pairs)
        self.take(tensors)
        kept = sum(len(rows) for rows in self.basis.values())
        log(f"hack directions: {kept} in {len(self.basis)} modules, from {used} pairs; cosine of held-out pairs "
            f"with the mean of these {self.cosine:.2f}; arm {self.args.arm}")

    def _read_or_extract(self, pairs: list[dict]) -> dict[str, Tensor]:
        """The tensors of the directions file, which is made where it is missing."""
        model = self.policy.model
        header = {
            "schema": SCHEMA,
            "model": model.weights,
            "pairs": pairs_hash(self.policy, pairs),
            "dtype": str(next(self.policy.hf.parameters()).dtype),
            "heldout": str(self.args.hack_heldout),
            "k": str(len(pairs) - self.args.hack_heldout),
        }
        key = hashlib.sha256(json.dumps(header).encode()).hexdigest()[:24]
        path = Path(self.args.hack_directions or cache_home() / f"hack-{key}.safetensors")
        if not path.is_file():
            tensors, cosine = extract(self.policy, pairs, self.args.hack_heldout)
            write_tensors(path, tensors, header | {"cosine": f"{cosine:.4f}"})
        tensors, self.cosine = load(path, header, model)
        return tensors

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Make these directions, or as many random ones, the basis."""
        basis = choose(tensors, self.args.hack_k, self.args.hack_drop)
        if self.args.arm == "random":
            basis = random_like(basis, self.args.seed, self.steps)
        self.basis = self.placed(basis)

    def placed(self, basis: dict[str, Tensor]) -> dict[str, Tensor]:
        layers = self.policy.model.layers
        return {name: rows.to(layers[name].delta.device) for name, rows in basis.items()}

    def on_part(self, policy) -> None:
        """Remember the gradients so far, where a step's backward is split by source."""
        if not self.basis:
            return
        gradients = {}
        for name, layer in policy.model.layers.items():
            if layer.delta.grad is not None:
                gradients[name] = layer.delta.grad.clone()
        self.parts.append(gradients)

    def shares(self) -> dict[str, float]:
        """Energy fraction inside the subspace of the live and of the cached rollouts' gradient."""
        parts, self.parts = self.parts, []
        if len(parts) != 2:
            return {}
        live, both = parts
        cached = {}
        for name, whole in both.items():
            cached[name] = whole - live[name] if name in live else whole
        return {"cin_s": energy_share(live, self.basis), "cin_t": energy_share(cached, self.basis)}

    @torch.no_grad()
    def on_gradients(self, policy) -> dict[str, float]:
        """Measure, and but for `vanilla` change, the gradient of every δ. Energies are summed over modules."""
        if not self.basis:
            return {}
        self.before = {}
        before = EnergyShare()  # of the gradients, before and after the projection
        after = EnergyShare()
        fired = 0
        for name, layer in policy.model.layers.items():
            gradient = layer.delta.grad
            if gradient is None:
                continue
            self.before[name] = layer.delta.detach().clone()
            rows = self.basis.get(name)
            if rows is not None:
                rest, changed = project(gradient, rows, self.args.hack_gate, self.args.preserve_magnitude)
                fired += changed
                if self.args.arm != "vanilla":
                    layer.delta.grad = rest
            before.add(gradient, rows)
            after.add(layer.delta.grad, rows)
        measured = {"cin": before.share(), "cout": after.share(), "fired": fired / max(1, len(self.before))}
        return measured | self.shares()

    def after_step(self) -> dict[str, float]:
        """Share of the optimizer's own step that goes towards the hack: momentum and scaling bring some of it back."""
        if not self.basis:
            return {}
        whole = 0.0
        towards = 0.0
        for name, before in self.before.items():
            moved = self.policy.model.layers[name].delta.detach() - before
            whole += float(moved.square().sum())
            if name in self.basis:
                along = self.basis[name] @ moved
                towards += float(along.clamp(min=0).square().sum())
        self.before = {}
        self.steps += 1
        if self.args.hack_refresh and self.steps % self.args.hack_refresh == 0:
            self.refresh()
        return {"adam_leak": towards / whole if whole else 0.0, "pairs_cosine": self.cosine}

    def refresh(self) -> None:
        """Extract the directions again, from the policy as it is; a checkpoint then holds them."""
        tensors, self.cosine = extract(self.policy, self.pairs(), self.args.hack_heldout)
        self.take(tensors)
        rows = {name: rows.cpu().contiguous() for name, rows in self.basis.items()}
        self.saved = base64.b64encode(safetensors.torch.save(rows)).decode()

    def state_dict(self) -> dict:
        return {
            "arm": self.args.arm,
            "steps": self.steps,
            "basis": self.saved,
            "cosine": self.cosine,
        }

    def load_state_dict(self, state: dict) -> None:
        if state["arm"] != self.args.arm:
            raise UserError(f"--arm {self.args.arm}: the run began with {state['arm']}, and a resume cannot change it")
        self.steps = state["steps"]
        self.saved = state["basis"]
        if self.saved:
            self.cosine = state["cosine"]
            self.basis = self.placed(safetensors.torch.load(base64.b64decode(self.saved)))


def project(gradient: Tensor, rows: Tensor, gate: str, preserve_magnitude: bool) -> tuple[Tensor, bool]:
    """The gradient (r,) without its part along `rows` (k, r), orthonormal and pointing towards the hack; and whether
    anything was removed.

    Descent moves δ along -gradient, so its component towards the hack is c = rows @ (-gradient): `one_sided` removes
    the positive ones, `no_gate` all of them.
    """
    towards = rows @ -gradient
    removed = towards if gate == "no_gate" else towards.clamp(min=0)
    if not bool((removed != 0).any()):
        return gradient, False
    rest = gradient + rows.T @ removed
    if preserve_magnitude and bool(rest.norm() > 0):
        rest = rest * (gradient.norm() / rest.norm())
    return rest, True


class EnergyShare:
    """Share of gradients' squared norm that lies along a basis, summed over modules."""

    def __init__(self):
        self.whole = 0.0
        self.inside = 0.0

    def add(self, gradient: Tensor, rows: Tensor | None) -> None:
        """A module's gradient (r,) and its directions (k, r), None where it has none."""
        self.whole += float(gradient.square().sum())
        if rows is not None:
            self.inside += float((rows @ gradient).square().sum())

    def share(self) -> float:
        return self.inside / self.whole if self.whole else 0.0


def energy_share(gradients: dict[str, Tensor], basis: dict[str, Tensor]) -> float:
    energy = EnergyShare()
    for name, gradient in gradients.items():
        energy.add(gradient, basis.get(name))
    return energy.share()


# ---- extraction
def pairs_hash(policy, pairs: list[dict]) -> str:
    ids = []
    for pair in pairs:
        hacked = completion_ids(policy, pair["messages"], pair["hacked"])
        honest = completion_ids(policy, pair["messages"], pair["honest"])
        ids.append([hacked, honest])
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def completion_ids(policy, messages: list[dict], completion: str) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of a completion, its end token included."""
    said = policy.tokenizer.encode(completion, add_special_tokens=False)
    return policy.encode(Prompt(messages)), [*said, policy.tokenizer.eos_token_id]


def likelihood(policy, messages: list[dict], completion: str) -> Tensor:
    """Mean log-likelihood of a completion's tokens, in nats."""
    prompt, said = completion_ids(policy, messages, completion)
    ids = torch.tensor([prompt + said], device=policy.device)
    logits = policy.hf(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp = logits.float().log_softmax(-1)
    return logp.gather(-1, ids[0, len(prompt) :, None]).mean()


def differences(policy, pairs: list[dict]) -> dict[str, Tensor]:
    """Gradient of the mean log-likelihood with respect to δ, hacked minus honest: module -> (pairs, r), float32."""
    layers = policy.model.layers
    deltas = [layer.delta for layer in layers.values()]
    rows: dict[str, list[Tensor]] = {name: [] for name in layers}
    for pair in pairs:
        hacked = likelihood(policy, pair["messages"], pair["hacked"])
        honest = likelihood(policy, pair["messages"], pair["honest"])
        gradients = torch.autograd.grad(hacked - honest, deltas)
        for name, gradient in zip(layers, gradients, strict=True):
            rows[name].append(gradient.detach().float().cpu())
    return {name: torch.stack(some) for name, some in rows.items()}


def extract(policy, pairs: list[dict], heldout: int) -> tuple[dict[str, Tensor], float]:
    """Directions and singular values of every module, and the mean cosine of held-out pairs with the others' mean.

    A direction's sign is that of its rows' mean projection: it points from honest to hacked.
    """
    order = rng_of(0, "hack pairs").permutation(len(pairs))
    rows = differences(policy, [pairs[i] for i in order])
    tensors = {}
    cosines = []
    for name, every in rows.items():
        train = every[heldout:]
        _, values, vectors = torch.linalg.svd(train, full_matrices=False)
        mean = train.mean(0)
        sign = torch.where(vectors @ mean < 0, -1.0, 1.0)
        tensors[f"{name}.directions"] = (vectors * sign[:, None]).contiguous()
        tensors[f"{name}.values"] = values.contiguous()
        cosine = torch.nn.functional.cosine_similarity(every[:heldout], mean[None])
        cosines.append(cosine.mean().item())
    return tensors, float(np.mean(cosines))


def load(path: Path, header: dict, model: SVDModel) -> tuple[dict[str, Tensor], float]:
    """The tensors of a directions file and its held-out cosine. UserError where they belong to something else."""
    again = f"remove {path} (or give another --hack-directions) and they are extracted again"
    try:
        found = read_header(path)
        tensors = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}; {again}") from error
    for key, value in header.items():
        if found.get(key) != value:
            raise UserError(f"{path} was made for another {key} ({found.get(key)}, here {value}); {again}")
    wanted = {f"{name}.directions": len(layer.delta) for name, layer in model.layers.items()}
    given = {f"{name}.directions": tensors[f"{name}.directions"].shape[1] for name in modules_of(tensors)}
    if wanted != given:
        raise UserError(f"{path} has other modules or ranks than this model; {again}")
    return tensors, float(found["cosine"])


def modules_of(tensors: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix(".directions") for name in tensors if name.endswith(".directions")]


def choose(tensors: dict[str, Tensor], k: int, drop: float) -> dict[str, Tensor]:
    """The first k directions of each module, without those in the lowest quantile `drop` of all singular values."""
    names = modules_of(tensors)
    values = torch.cat([tensors[f"{name}.values"][:k] for name in names])
    least = values.quantile(drop) if drop else values.min()
    kept = {}
    for name in names:
        strong = tensors[f"{name}.values"][:k] >= least
        rows = tensors[f"{name}.directions"][:k][strong]
        if len(rows):
            kept[name] = rows
    return kept


def random_like(basis: dict[str, Tensor], seed: int, step: int = 0) -> dict[str, Tensor]:
    """As many orthonormal directions a module, drawn at random."""
    refreshed = [step] if step > 0 else []
    out = {}
    for name, rows in basis.items():
        generator = torch.Generator().manual_seed(seed_of(seed, "random directions", name, *refreshed))
        noise = torch.randn(rows.shape[1], len(rows), generator=generator)
        orthonormal = torch.linalg.qr(noise)[0]
        out[name] = orthonormal.T.contiguous()
    return out
