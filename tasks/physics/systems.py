"""The physical systems of task `physics`: true equations, parameters, and sampled trajectories of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from data import UserError, nearest, rng_of
from tasks.physics.equations import Equation, parse
from tasks.physics.simulation import simulate

SAMPLES = 100


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """An observed variable. Of order 2 it has a velocity, whose unit is this one's per second."""

    name: str
    unit: str
    start: tuple[float, float]  # range of the initial value
    velocity: str = ""  # the name of its time derivative; empty: the equation is of first order
    velocity_start: tuple[float, float] = (0.0, 0.0)

    @property
    def order(self) -> int:
        return 2 if self.velocity else 1


@dataclasses.dataclass(frozen=True)
class System:
    """A physical system: parameters as name -> (low, high, unit), seconds that are observed, the true equation."""

    id: str
    title: str
    coordinates: tuple[Coordinate, ...]
    parameters: dict[str, tuple[float, float, str]]
    seconds: float
    equation: str

    def parse(self, text: str, declared: dict[str, float] | None = None) -> Equation:
        """An answer's equation for this system. Raises ParseError with a reason."""
        return parse(text, self.coordinates, self.parameters, declared)


_G = (9.81, 9.81, "m/s^2")
SYSTEMS = {system.id: system for system in (
    System("free_fall", "a body in free fall, y upwards", (Coordinate("y", "m", (20, 60), "v", (-2, 5)),),
           {"g": _G}, 3, "d2y/dt2 = -g"),
    System("free_fall_drag", "a falling body with quadratic air drag, y upwards",
           (Coordinate("y", "m", (20, 60), "v"),),
           {"g": _G, "m": (0.5, 2, "kg"), "c": (0.02, 0.1, "kg/m")}, 6,
           "d2y/dt2 = -g - (c/m)*v*abs(v)"),
    System("simple_pendulum", "a simple pendulum", (Coordinate("theta", "rad", (0.3, 1), "omega"),),
           {"g": _G, "L": (0.5, 2, "m")}, 6, "d2theta/dt2 = -(g/L)*sin(theta)"),
    System("damped_pendulum", "a damped pendulum", (Coordinate("theta", "rad", (0.3, 1), "omega"),),
           {"g": _G, "L": (0.5, 2, "m"), "b": (0.05, 0.3, "1/s")}, 10,
           "d2theta/dt2 = -(g/L)*sin(theta) - b*omega"),
    System("spring", "a mass on a spring", (Coordinate("x", "m", (0.5, 2), "v"),),
           {"k": (2, 20, "N/m"), "m": (0.5, 2, "kg")}, 6, "d2x/dt2 = -(k/m)*x"),
    System("damped_spring", "a mass on a spring with linear damping", (Coordinate("x", "m", (0.5, 2), "v"),),
           {"k": (2, 20, "N/m"), "m": (0.5, 2, "kg"), "b": (0.1, 0.8, "kg/s")}, 8, "d2x/dt2 = -(k/m)*x - (b/m)*v"),
    System("driven_damped_spring", "a damped spring with a periodic drive", (Coordinate("x", "m", (0.5, 2), "v"),),
           {"k": (2, 20, "N/m"), "m": (0.5, 2, "kg"), "b": (0.2, 1, "kg/s"), "F": (1, 5, "N"), "w": (0.5, 4, "rad/s")},
           12, "d2x/dt2 = -(k/m)*x - (b/m)*v + (F/m)*cos(w*t)"),
    System("rc_discharge", "a capacitor that discharges through a resistor", (Coordinate("V", "V", (3, 12)),),
           {"R": (1000, 5000, "ohm"), "C": (2e-4, 8e-4, "F")}, 5, "dV/dt = -V/(R*C)"),
    System("newton_cooling", "a body that cools in air (Newton's law)", (Coordinate("T", "degC", (60, 95)),),
           {"h": (0.05, 0.3, "1/s"), "Ta": (15, 30, "degC")}, 20, "dT/dt = -h*(T - Ta)"),
    System("exponential_decay", "radioactive decay", (Coordinate("N", "nuclei", (100, 1000)),),
           {"lambda": (0.1, 0.8, "1/s")}, 8, "dN/dt = -lambda*N"),
    System("logistic_growth", "a population with a carrying capacity", (Coordinate("N", "individuals", (2, 15)),),
           {"r": (0.3, 1.2, "1/s"), "K": (50, 200, "individuals")}, 12, "dN/dt = r*N*(1 - N/K)"),
    System("projectile_drag", "a projectile with quadratic air drag, y upwards",
           (Coordinate("x", "m", (0, 0), "vx", (8, 25)), Coordinate("y", "m", (0, 2), "vy", (8, 25))),
           {"g": _G, "m": (0.2, 1, "kg"), "c": (0.005, 0.03, "kg/m")}, 3,
           "d2x/dt2 = -(c/m)*vx*sqrt(vx^2 + vy^2); d2y/dt2 = -g - (c/m)*vy*sqrt(vx^2 + vy^2)"),
    System("van_der_pol", "a Van der Pol oscillator", (Coordinate("x", "m", (0.5, 2), "v"),),
           {"mu": (0.5, 3, "1/s")}, 15, "d2x/dt2 = mu*(1 - x^2)*v - x"),
    System("lotka_volterra", "prey x and predators y (Lotka-Volterra)",
           (Coordinate("x", "hundreds", (1, 3)), Coordinate("y", "hundreds", (0.5, 2))),
           {"alpha": (0.6, 1.3, "1/s"), "beta": (0.4, 0.9, "1/s"), "gamma": (0.5, 1.2, "1/s"),
            "delta": (0.2, 0.6, "1/s")}, 15, "dx/dt = alpha*x - beta*x*y; dy/dt = delta*x*y - gamma*y"),
)}  # fmt: skip


def system_of(system_id: str) -> System:
    if system_id not in SYSTEMS:
        raise UserError(f"unknown system {system_id}{nearest(system_id, SYSTEMS)}; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[system_id]


@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """A system with drawn parameters and its observation.

    times (SAMPLES,) seconds; clean, observed (coordinates, SAMPLES) without and with noise; `initial` is the exact
    state at times[0], by name (coordinates, then velocities).
    """

    key: str
    system_id: str
    parameters: dict[str, float]
    initial: dict[str, float]
    times: np.ndarray
    clean: np.ndarray
    observed: np.ndarray

    @property
    def system(self) -> System:
        return SYSTEMS[self.system_id]

    def plain(self) -> dict[str, Any]:
        """As JSON types."""
        found = dict(vars(self))
        for name in ("times", "clean", "observed"):
            found[name] = found[name].tolist()
        return found

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Instance:
        arrays = {name: np.asarray(plain[name], dtype=float) for name in ("times", "clean", "observed")}
        return cls(**{**plain, **arrays})


@functools.lru_cache(maxsize=4096)
def make_instance(system_id: str, number: int, part: str = "train", noise: float = 0.0) -> Instance:
    """Instance `number` of a system, the same in every run; `part` (train, heldout) gives other draws.

    `noise` is a Gaussian's standard deviation as a share of each coordinate's own standard deviation. Parameters and
    initial values have four digits, so that a prompt can show them as they are.
    """
    system = system_of(system_id)
    rng = rng_of(0, "physics", system_id, part, number)

    def draw(low: float, high: float) -> float:
        return float(f"{rng.uniform(low, high):.4g}") if high > low else float(low)

    parameters = {}
    for name, (low, high, _) in system.parameters.items():
        parameters[name] = draw(low, high)
    initial = {}
    for q in system.coordinates:
        initial[q.name] = draw(*q.start)
    for q in system.coordinates:
        if q.velocity:
            initial[q.velocity] = draw(*q.velocity_start)
    times = np.linspace(0.0, system.seconds, SAMPLES)
    clean = simulate(system.parse(system.equation), parameters, initial, times, rtol=1e-8, calls=10**6)
    deviation = clean.std(axis=1, keepdims=True)
    observed = clean + noise * deviation * rng.standard_normal(clean.shape)
    key = f"{system_id}/{part}/{number}/{noise:g}"
    return Instance(key, system_id, parameters, initial, times, clean, observed)
