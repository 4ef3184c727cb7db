"""TieringManager, the asyncio interface, with device copies that can be awaited and its statistics."""
