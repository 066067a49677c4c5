"""An adapter that trains singular values: W' = W + U diag(δ) Vᵀ with W = U diag(S) Vᵀ and one trained vector δ a layer.

δ = 0 is the base model exactly (W itself stays as it was, the adapter's term is added), so the reference policy is the
same model with its adapter off. Decompositions are kept in the user's cache folder, named and checked by hash.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from data import UserError
from harness.files import cache_home, written_aside
from models.adapters import BesideWeights

FILE, SCHEMA = "svd_adapter.safetensors", "1"


class SVDLinear(nn.Module):
    """A linear layer y = W x (+ b), W (out, in), with the term U (δ ⊙ (Vᵀ x)); U (out, r), V (in, r), δ (r,) float32.

    `base_layer` holds W untouched.
    """

    def __init__(self, base: nn.Module, u: Tensor, vh: Tensor):
        super().__init__()
        weight = base.weight
        self.base_layer, self._disable_adapters = base, False
        self.transposed = isinstance(base, Conv1D)  # its weight is (in, out)
        self.register_buffer("u", u.to(weight.device, weight.dtype), persistent=False)
        self.register_buffer("vh", vh.to(weight.device, weight.dtype), persistent=False)
        self.delta = nn.Parameter(torch.zeros(u.shape[1], dtype=torch.float32, device=weight.device))

    @property
    def disable_adapters(self) -> bool:
        return self._disable_adapters

    def get_base_layer(self) -> nn.Module:
        return self.base_layer

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def get_delta_weight(self, _name: str = "default") -> Tensor:
        """U diag(δ) Vᵀ, in the layout of the base layer's weight."""
        change = (self.u * self.delta.detach().to(self.u.dtype)) @ self.vh
        return change.T if self.transposed else change

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        if self._disable_adapters:
            return y
        return y + ((x @ self.vh.T) * self.delta.to(x.dtype)) @ self.u.T


class SVDModel(nn.Module):
    """A Hugging Face model `hf` whose blocks' linear layers are `SVDLinear`, by name in `layers`."""

    def __init__(self, hf: nn.Module, source: str, cache: bool = True, log=print):
        super().__init__()
        head = hf.get_output_embeddings()
        found = {name: module for name, module in hf.named_modules()
                 if isinstance(module, nn.Linear | Conv1D) and module is not head}
        odd = {type(module).__name__ for module in found.values()} - {"Linear", "Conv1D"}
        if odd or not found:
            raise UserError(f"--adapter svd decomposes plain linear layers, this model has {', '.join(odd) or 'none'}; "
                            "leave out --load-4bit, or use --adapter lora")
        hf.requires_grad_(False)
        self.source, self.weights = source, weights_hash(found)
        parts = decompositions(found, source, self.weights, cache, log)
        self.layers: dict[str, SVDLinear] = {}
        for name, module in found.items():
            owner, _, attribute = name.rpartition(".")
            self.layers[name] = SVDLinear(module, *parts[name])
            setattr(hf.get_submodule(owner), attribute, self.layers[name])
        self.hf = hf

    def forward(self, *args, **keywords):
        return self.hf(*args, **keywords)

    def get_base_model(self) -> nn.Module:
        return self.hf

    @contextlib.contextmanager
    def disable_adapter(self):
        """Within: the base model, as if every δ were 0."""
        before = [layer._disable_adapters for layer in self.layers.values()]
        try:
            for layer in self.layers.values():
                layer._disable_adapters = True
            yield
        finally:
            for layer, was in zip(self.layers.values(), before, strict=True):
                layer._disable_adapters = was

    def save_pretrained(self, folder: str | Path) -> None:
        """Every δ, by module name, with what it belongs to."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, layer in self.layers.items():
            tensors[name] = layer.delta.detach().cpu().contiguous()
        header = {"schema": SCHEMA, "base_model_name_or_path": self.source, "weights": self.weights}
        # one entry: several are written in an order that changes from file to file
        safetensors.torch.save_file(tensors, Path(folder) / FILE, {"header": json.dumps(header)})

    def load(self, folder: str | Path) -> None:
        """Take the δ of a folder. UserError where they belong to other weights."""
        file = Path(folder) / FILE
        header = read_header(file)
        tensors = safetensors.torch.load_file(file)
        found = {name: tensor.shape for name, tensor in tensors.items()}
        shapes = {name: layer.delta.shape for name, layer in self.layers.items()}
        same = header.get("schema") == SCHEMA and header.get("weights") == self.weights
        if not same or found != shapes:
            raise UserError(f"{file} was trained on other weights than those of {self.source}")
        with torch.no_grad():
            for name, layer in self.layers.items():
                layer.delta.copy_(tensors[name])

    def merged_state(self) -> dict[str, Tensor]:
        """The state dict of the plain model, with each adapter's term added to its weight."""
        state = {}
        for name, tensor in self.hf.state_dict().items():
            owner, _, attribute = name.rpartition(".base_layer.")
            if owner and attribute == "weight":
                wide = tensor.float() + self.layers[owner].get_delta_weight().float()
                state[f"{owner}.weight"] = wide.to(tensor.dtype)
            elif owner:
                state[f"{owner}.{attribute}"] = tensor
            elif not name.endswith(".delta"):
                state[name] = tensor
        return state

    def merged(self) -> nn.Module:
        """A plain model of the same class with the adapter in its weights."""
        config = copy.deepcopy(self.hf.config)
        config._attn_implementation = "eager"  # not the engine's, which other programs do not know
        plain = type(self.hf)(config).to(next(self.hf.parameters()).dtype)
        plain.load_state_dict(self.merged_state(), strict=True)
        plain.generation_config = self.hf.generation_config
        return plain


@dataclasses.dataclass(frozen=True)
class SingularValues(BesideWeights):
    """The differences of singular values of models/svd.py."""

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        self.model.load(folder)

    def merged(self, checkpoint: Path | None) -> nn.Module:
        return self.model.merged()

    def layers_to_merge(self) -> list:
        layers = [layer for layer in self.model.modules() if isinstance(layer, SVDLinear)]
        return [] if any(layer.disable_adapters for layer in layers) else layers


def read_header(path: Path) -> dict:
    with safetensors.safe_open(path, "pt") as file:
        header = file.metadata() or {}
    return json.loads(header["header"]) if "header" in header else header


def saved_base(folder: str) -> str | None:
    """The base model that a folder's SVD adapter belongs to; None where the folder holds none."""
    path = Path(folder) / FILE
    return read_header(path)["base_model_name_or_path"] if path.is_file() else None


def digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous()
        total.update(f"{name} {flat.dtype} {tuple(flat.shape)}\n".encode())
        total.update(flat.view(torch.uint8).numpy().tobytes() if flat.ndim else b"")
    return total.hexdigest()


def weights_hash(modules: dict[str, nn.Module]) -> str:
    return digest({name: module.weight for name, module in modules.items()})


@torch.no_grad()
def decompositions(modules: dict[str, nn.Module], source: str, weights: str, cache: bool, log
                   ) -> dict[str, tuple[Tensor, Tensor]]:
    """U (out, r) and Vᵀ (r, in) of every weight, r = min(out, in), from the cache or made now and kept there."""
    path = cache_home() / f"svd-{Path(source).name[:40]}-{weights[:24]}.safetensors"
    tensors = read_decompositions(path, weights, log) if cache else {}
    if not tensors:
        for name, module in modules.items():
            weight = module.weight.detach().float()
            if isinstance(module, Conv1D):
                weight = weight.T
            u, _, vh = torch.linalg.svd(weight, full_matrices=False)
            tensors[f"{name}.u"] = u.cpu().contiguous()
            tensors[f"{name}.vh"] = vh.cpu().contiguous()
        if cache:
            write_tensors(path, tensors, {"weights": weights, "digest": digest(tensors)})
    return {name: (tensors[f"{name}.u"], tensors[f"{name}.vh"]) for name in modules}


def read_decompositions(path: Path, weights: str, log) -> dict[str, Tensor]:
    """The tensors of a file in the cache; none where it is not there, damaged, or of other weights."""
    if not path.is_file():
        return {}
    with contextlib.suppress(safetensors.SafetensorError, OSError, KeyError):
        tensors = safetensors.torch.load_file(path)
        if read_header(path) == {"weights": weights, "digest": digest(tensors)}:
            return tensors
    log(f"{path} is damaged; the decompositions are made again")
    return {}


def write_tensors(path: Path, tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """One safetensors file that appears whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(path) as part:
            safetensors.torch.save_file(tensors, part, header)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
