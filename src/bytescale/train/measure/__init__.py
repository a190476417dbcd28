"""What a step measures and reports, beside the work: times, waits, memory, the line of metrics, the trace."""
