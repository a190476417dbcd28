"""What several strategies share: degrees, times, packing, list scheduling, rows of a plan."""
