"""Smaller, faster networks with almost no loss of accuracy: structured pruning in the Kronecker-factored eigenbasis."""

from eigendamage.cost import Cost, count
from eigendamage.curvature import Curvature
from eigendamage.measuring import measure
from eigendamage.methods import METHODS
from eigendamage.planning import plan
from eigendamage.plans import Plan
from eigendamage.storage import load, save
from eigendamage.surgery import apply

__all__ = ["METHODS", "Cost", "Curvature", "Plan", "apply", "count", "load", "measure", "plan", "save"]
