"""The configuration: vLLM's names, one clear error, and nothing silently ignored."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from kvtier import TieringConfig
from kvtier._core.limits import Limits
from kvtier._settings import validation
from kvtier.errors import ConfigError
from kvtier_testing.dummy import DummyConfig

GIB = 2**30


def config(**settings):
    return TieringConfig.from_mapping({"cpu_bytes_to_use": GIB, **settings})


def refusal(**settings):
    with pytest.raises(ConfigError) as caught:
        config(**settings)
    return str(caught.value)


def test_only_size_is_required():
    assert config().cpu_bytes_to_use == GIB
    with pytest.raises(ConfigError, match=r"^cpu_bytes_to_use is missing \(Size of the primary tier"):
        TieringConfig.from_mapping({})


def test_tiers_get_own_models(acme):
    tiers = config(
        secondary_tiers=[{"type": "dummy", "seed": 7}, {"type": "acme", "root_dir": "/x"}]
    ).secondary_tiers
    assert tiers[0] == DummyConfig(type="dummy", seed=7)
    assert (tiers[1].type, tiers[1].root_dir) == ("acme", "/x")


@pytest.mark.parametrize("tier", ["dummy", 3, None])
def test_non_mapping_tier(tier):
    assert refusal(secondary_tiers=[tier]).startswith("secondary_tiers[0] must be a mapping")


@pytest.mark.parametrize("tiers", ["dummy", {"type": "dummy"}, 3])
def test_tiers_not_a_list(tiers):
    assert refusal(secondary_tiers=tiers).startswith("secondary_tiers: a list of tiers is needed")


def test_unknown_policy_lists_installed():
    assert refusal(eviction_policy="lur").startswith(
        "eviction_policy = 'lur': no such eviction policy; installed are: arc, auto, lhd, lru"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("offload_prompt_only", "false"),  # vLLM would accept this text as true
        ("promotion_budget", 1.5),
        ("request_deadline_s", float("nan")),
        ("request_deadline_s", 5000),  # meant in milliseconds
        ("copy_deadline_s", 1e-9),
        ("drain_on_shutdown_s", 1e30),  # longer than Python can wait for a thread
        ("cpu_bytes_to_use", "much"),
        ("audit_rate", False),
        ("isolation", "none"),
        ("namespace", "\ud800"),
    ],
)
def test_out_of_range_is_shown(name, value):
    assert refusal(**{name: value}).startswith(f"{name} = {value!r}: ")


def test_chunk_size_has_one_unit():
    assert "set block_size or blocks_per_chunk, not both" in refusal(block_size=32, blocks_per_chunk=2)
    assert config(blocks_per_chunk=2).blocks_per_chunk == 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([None], ("dummy",)),
        ([None, None, None], ("dummy", "dummy-2", "dummy-3")),
        (["near", "far"], ("near", "far")),
        ([None, "dummy"], ("dummy-2", "dummy")),
        ([None, "dummy-2", None], ("dummy", "dummy-2", "dummy-3")),
    ],
)
def test_tiers_have_own_names(names, expected):
    tiers = [{"type": "dummy", "name": name} for name in names]
    assert config(secondary_tiers=tiers).tier_names == expected


def test_duplicate_name_is_refused():
    tiers = [{"type": "dummy", "name": "near"}, {"type": "dummy", "name": "near"}]
    assert "two tiers have the name near" in refusal(secondary_tiers=tiers)


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", 'a"', "a\n", "a" * 65])
def test_non_label_name_is_refused(name):
    message = refusal(secondary_tiers=[{"type": "dummy", "name": name}])
    assert "secondary_tiers[0].name" in message
    assert "letters, digits" in message


def test_primary_name_is_refused():
    assert "'cpu' is reserved for the primary tier" in refusal(
        secondary_tiers=[{"type": "dummy", "name": "cpu"}]
    )


@pytest.mark.parametrize("paths", ["", "/a\0b"])
def test_unnamed_root_is_refused(paths):
    message = refusal(secondary_tiers=[{"type": "fs", "root_dir": paths}])
    assert "secondary_tiers[0]." in message
    assert "name a directory" in message


def test_all_errors_are_reported(install_distribution):
    install_distribution("acme-broken", "1 / 0", {"broken": "Tier"})
    tiers = [
        {"type": "dumny"},
        {"type": "dummy", "sed": 1},
        {"type": "broken"},
        {"type": "fs", "n_threads": 0},
    ]
    message = refusal(secondary_tiers=tiers, block_size=0, stor_threshold=2)
    for words in (
        "secondary_tiers[0].type = 'dumny': no such tier",
        "secondary_tiers[1].sed is not a setting",
        "ZeroDivisionError",
        "secondary_tiers[3].n_threads = 0",
        "secondary_tiers[3].root_dir is missing",
        "block_size = 0",
        "did you mean store_threshold?",
    ):
        assert words in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"root_dir": "/kv"}, "root_dir is in the wrong place: move it into a tier of secondary_tiers"),
        (
            {"secondary_tiers": [{"type": "fs", "root_dir": "/kv", "namespace": "a"}]},
            "secondary_tiers[0].namespace is in the wrong place: move it out of secondary_tiers",
        ),
        (
            {"kv_role": "kv_both"},
            "kv_role is in the wrong place: move it out of kv_connector_extra_config, next to kv_connector",
        ),
    ],
)
def test_misplaced_setting_is_told_its_place(settings, words):
    assert refusal(**settings) == words


def test_text_in_place_of_a_list_is_refused_in_words():
    class Servers(BaseModel):
        addresses: tuple[str, ...]

    with pytest.raises(ConfigError, match=r"^addresses = 'a:1': a list is needed$"):
        validation.build(Servers, {"addresses": "a:1"})


@pytest.mark.parametrize(
    "roots",
    [
        ["/a", "/a"],
        ["/a", "/a/"],
        ["/a", "/a/b"],
        ["/a/b/c", "/a"],
        ["/a/../b", "/b"],
        ["/", "/a"],
    ],
)
def test_overlapping_roots_are_refused(roots):
    tiers = [{"type": "fs", "root_dir": root} for root in roots]
    message = refusal(secondary_tiers=tiers)
    assert "secondary_tiers: fs (/" in message
    assert "one inside the other" in message
    assert "fs-2 (/" in message


def test_sibling_roots_are_accepted():
    assert config(secondary_tiers=[{"type": "fs", "root_dir": root} for root in ("/a/b", "/a/bc", "/a/c")])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_bytes", "lots", "write a number of bytes, or text with a unit, such as 64GiB"),
        ("max_bytes", "10 potatoes", "write a number of bytes, or text with a unit"),
        ("root_dir", 7, "a path is needed, as text"),
        ("ttl_s", float("inf"), "a finite number is needed"),
        ("n_threads", True, "a number is needed, not true or false"),
        ("max_bytes", -1, "write a number of bytes, or text with a unit, such as 64GiB"),
    ],
)
def test_refusal_names_settings(name, value, words):
    message = refusal(secondary_tiers=[{"type": "fs", "root_dir": "/a", name: value}])
    assert f"secondary_tiers[0].{name} = {value!r}: {words}" in message


class TestExtraConfig:
    def test_engine_settings_pass(self):
        raw = {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.adapters.vllm.spec",
            "sync_load_budget_bytes": 1,
            "cpu_bytes_to_use": GIB,
            "store_threshold": 2,
        }
        assert TieringConfig.from_extra_config(raw) == config(store_threshold=2)

    def test_shared_settings_are_checked(self):
        raw = {"cpu_bytes_to_use": GIB, "canonical_layout": True}
        assert TieringConfig.from_extra_config(raw).canonical_layout
        with pytest.raises(ConfigError, match=r"^canonical_layout = 'yes': .*valid boolean"):  # true to vLLM
            TieringConfig.from_extra_config({**raw, "canonical_layout": "yes"})

    def test_engine_keys_are_not_settings(self):
        assert refusal(spec_name="x").startswith("spec_name is not a setting")

    @pytest.mark.parametrize("key", ["backpressure", "cache_policy_module_path", "tier_poll_interval_s"])
    def test_other_specs_settings_refused(self, key):
        with pytest.raises(ConfigError, match=f"^remove {key}: it belongs to vLLM's own"):
            TieringConfig.from_extra_config({"cpu_bytes_to_use": GIB, key: 1})


def test_limits_of_core_are_settings() -> None:
    fixed = {"promotion_reserve", "put_backlog", "max_announced"}
    assert {*Limits.__struct_fields__} - TieringConfig.model_fields.keys() == fixed
