"""One module a strategy, named as the user names it; each holds one function from a `Problem` to a `StepPlan`."""
