"""Mixtures of experts: which experts compute a token (`routing`), and their products (`mixture`).

T tokens, E experts, K experts a token, T K pairs of both, H hidden size, I intermediate size of an expert. Few pairs are a
tile of the products each; more are grouped by expert (`grouping`), always within sizes that the host knows, so a pass can be
captured.
"""

from engine.kernels.experts.mixture import Clamp, Experts, mixture
from engine.kernels.experts.routing import Choice, Held, route
from engine.kernels.experts.rule import RoutingRule, Score

__all__ = ["Choice", "Clamp", "Experts", "Held", "RoutingRule", "Score", "mixture", "route"]
