"""What operators and routers learn of an engine through vLLM, and the time of its steps."""
