"""Smaller, faster networks with almost no loss of accuracy: structured pruning in the Kronecker-factored eigenbasis."""

from eigendamage.compress import Report
from eigendamage.compress import compress as compress
from eigendamage.cost import Cost, count
from eigendamage.curvature import Curvature
from eigendamage.finetune import finetune as finetune
from eigendamage.frontier import Frontier
from eigendamage.frontier import frontier as frontier
from eigendamage.measuring import measure
from eigendamage.methods import METHODS
from eigendamage.planning import plan
from eigendamage.plans import Plan
from eigendamage.rounds import Round, iterate
from eigendamage.storage import load, save
from eigendamage.surgery import apply

__all__ = [
    "METHODS",
    "Cost",
    "Curvature",
    "Frontier",
    "Plan",
    "Report",
    "Round",
    "apply",
    "compress",
    "count",
    "finetune",
    "frontier",
    "iterate",
    "load",
    "measure",
    "plan",
    "save",
]
