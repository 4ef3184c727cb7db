"""The tables of settings in pages and READMEs."""

from __future__ import annotations

from kvtier_tools.settings_tables import tables


def test_table_shows_defaults(acme: None) -> None:
    lines = "\n".join(tables().values()).splitlines()
    assert any(line.startswith("| `cpu_bytes_to_use` | size | required | ") for line in lines)
    assert any(line.startswith("| `offload_prompt_only` | boolean | `true` | ") for line in lines)
    assert any(line.startswith("| `block_size` | integer | none | ") for line in lines)
    assert any(line.startswith("| `mode` | `fast` or `safe` | `safe` | ") for line in lines)
    assert any(line.startswith("| `secondary_tiers` | array | `[]` | ") for line in lines)
