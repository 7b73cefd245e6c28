"""ModelDescription + Target + Workload -> Plan: on how many cards a model runs, how, and why not otherwise.

Integers and formulas only: no torch here, and nothing is imported but `dayzero.core`.
"""

from dayzero.plan.answers import explain, frontier, plan_all
from dayzero.plan.figures import figure_names, with_figures
from dayzero.plan.options import PlanOptions
from dayzero.plan.planner import make_plan

__all__ = ["PlanOptions", "explain", "figure_names", "frontier", "make_plan", "plan_all", "with_figures"]
