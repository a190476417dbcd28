"""The insides of `best` and `chunked`: searches over degrees, placements and pipeline candidates."""
