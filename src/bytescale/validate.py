"""The proof of a plan under its documented name; it lives in `bytescale.plan.validate`."""

from bytescale.plan.validate import PlanError, PlanReport, validate

__all__ = ["PlanError", "PlanReport", "validate"]
