"""How sequences of several sources become one stream, and where in it a run stands."""
