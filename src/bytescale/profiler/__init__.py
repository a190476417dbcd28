"""The profiler: measures this machine for a model and fits the cost model to it."""
