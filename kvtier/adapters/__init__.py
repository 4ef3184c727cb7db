"""Where kvtier meets the engines. Each adapter is the only place that imports its engine."""
