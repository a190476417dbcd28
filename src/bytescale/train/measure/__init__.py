"""What a step measures and reports: times, waits, memory, the line of metrics, the trace."""
