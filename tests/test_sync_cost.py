"""The cost model finds the links that made its samples, and "auto" chooses by them."""

import json
import os

import numpy as np
import pytest

from trainer import sync
from trainer.errors import InputRefused
from trainer.sync import CostModel, Links, Profile, Sample

LINKS = Profile(CostModel(2e-5, 1e-10), CostModel(5e-4, 4e-8), seconds_per_exchange=1e-3)
SIZES = [2**power for power in range(8, 25, 2)]
WAYS = ["ring", "tree", "hierarchical", "xla"]


def counted(size, nodes=2, local=4, algorithm="ring"):
    return sync.traffic(np.zeros(size, np.float32), nodes, local, algorithm=algorithm)


def samples(noise):
    generator = np.random.default_rng(0)
    cases = [counted(size, algorithm=algorithm) for size in SIZES for algorithm in WAYS]
    return [Sample(case, sync.predict(LINKS, case) * (1 + noise * generator.normal())) for case in cases]


def test_exact_samples_give_the_links_back():
    found = sync.fit(samples(noise=0))
    np.testing.assert_allclose(np.hstack(found), np.hstack(LINKS), rtol=1e-6)


def test_noisy_samples_predict_other_sizes_and_more_nodes():
    found = sync.fit(samples(noise=0.05))
    for size in (3000, 70_000, 5_000_000):
        for algorithm in WAYS:
            case = counted(size, nodes=3, algorithm=algorithm)
            assert sync.predict(found, case) == pytest.approx(sync.predict(LINKS, case), rel=0.15)


def test_no_number_of_a_fit_is_negative_and_an_unused_link_gets_zeros():
    found = sync.fit([Sample(counted(size, nodes=1, local=8), 1e-3) for size in SIZES])
    assert min(np.hstack(found)) >= 0
    assert found.slow == CostModel(0, 0)
    assert sync.predict(found, counted(2**12, nodes=1, local=8)) == pytest.approx(1e-3, rel=1e-6)
    assert sync.fit([Sample(counted(size), 1e-3) for size in SIZES]).fast == CostModel(0, 0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(seconds):
    with pytest.raises(InputRefused, match="times are positive"):
        sync.fit([Sample(counted(100), seconds)])


def test_no_samples_are_refused():
    with pytest.raises(InputRefused, match="no samples"):
        sync.fit([])


def test_a_profile_survives_its_file(tmp_path):
    path = tmp_path / "links.json"
    sync.write_profile(LINKS, path)
    assert sync.read_profile(path) == LINKS
    assert json.loads(path.read_text())["slow"]["seconds_per_byte"] == 4e-8


def test_a_profile_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(InputRefused, match=r"links.json cannot be written: No such file"):
        sync.write_profile(LINKS, tmp_path / "nowhere" / "links.json")


GOOD = {"seconds_per_message": 1e-5, "seconds_per_byte": 1e-9}
WHOLE = {"fast": GOOD, "slow": GOOD, "seconds_per_exchange": 0}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "there is no such file"),
        ("", "it holds no JSON"),
        (b"\xff\xfe\x00", "it holds no JSON"),
        ("[" * 100_000, "it holds no JSON"),
        ("[]", r"it is \[\], not an object"),
        ({}, "fast is missing"),
        ({"fast": GOOD, "seconds_per_exchange": 0}, "slow is missing"),
        ({**WHOLE, "slow": {"seconds_per_byte": 0}}, "slow.seconds_per_message is missing"),
        ({**WHOLE, "slow": [1, 2]}, r"slow is \[1, 2\], not an object"),
        ({**WHOLE, "slow": {**GOOD, "seconds_per_byte": "1e-9"}}, "slow.seconds_per_byte is '1e-9', not a number"),
        ({**WHOLE, "seconds_per_exchange": None}, "seconds_per_exchange is None, not a number"),
        ({**WHOLE, "seconds_per_exchange": True}, "seconds_per_exchange is True, not a number"),
        ({**WHOLE, "seconds_per_exchange": -1.0}, "seconds_per_exchange is -1.0, not a number from 0 to 3600"),
        ({**WHOLE, "seconds_per_exchange": float("nan")}, "seconds_per_exchange is nan, not a number"),
        ({**WHOLE, "seconds_per_exchange": float("inf")}, "seconds_per_exchange is inf, not a number"),
        ({**WHOLE, "seconds_per_exchange": 10**400}, "seconds_per_exchange is 1000[0-9]*, not a number"),
        ({**WHOLE, "format_version": 2}, "format_version is 2, and this version of Lockstep reads 1"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_a_line_that_names_the_key(tmp_path, text, problem):
    path = tmp_path / "links.json"
    if isinstance(text, bytes):
        path.write_bytes(text)
    elif text is not None:
        path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(InputRefused, match=f"links.json is no profile of links: {problem}.*; measure one by") as caught:
        sync.read_profile(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_only_a_regular_file_is_read_as_a_profile(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputRefused, match="it is no regular file"):
            sync.read_profile(path)


CLUSTER = Links(num_nodes=4, devices_per_node=8, num_processes=32, platform="gpu")
LARGE, SMALL = np.zeros(10**6, np.float32), np.zeros(100, np.float32)


@pytest.mark.parametrize(
    ("gradient", "links", "algorithm", "because"),
    [
        (LARGE, Links(1, 1, 1, "gpu"), "xla", "one replica"),
        (LARGE, Links(2, 4, 1, "cpu"), "xla", "one process"),
        (LARGE, Links(1, 8, 8, "gpu"), "xla", "one node"),
        (LARGE, Links(4, 1, 4, "gpu"), "xla", "no fast link"),
        (LARGE, CLUSTER, "hierarchical", "only 1/8 of the gradient"),
        (SMALL, CLUSTER, "tree", "number of messages"),
        (LARGE, Links(2, 4, 8, "cpu", num_hosts=1), "xla", "no link is known to be slow"),
        (SMALL, Links(2, 4, 8, "cpu", num_hosts=1), "xla", "CPU of one host"),
        (LARGE, Links(2, 4, 8, "cpu", num_hosts=2), "hierarchical", "only 1/4 of the gradient"),
        (LARGE, Links(2, 4, 8, "cpu"), "hierarchical", "only 1/4 of the gradient"),
        (LARGE, Links(2, 4, 8, "gpu", num_hosts=1), "hierarchical", "only 1/4 of the gradient"),
    ],
)
def test_auto_follows_size_and_topology(gradient, links, algorithm, because):
    choice = sync.choose(gradient, links)
    assert choice.algorithm == algorithm
    assert because in choice.reason
    assert "\n" not in choice.reason


def test_auto_takes_what_the_links_make_quickest():
    slow_bytes = Profile(CostModel(0, 1e-11), CostModel(1e-12, 1e-8))
    # Nodes of six: with powers of two only, a tree that pairs neighbours first crosses the slow link no more often.
    sixes = CLUSTER._replace(num_nodes=4, devices_per_node=6)
    assert sync.choose(LARGE, sixes, profile=slow_bytes).algorithm == "hierarchical"
    slow_messages = Profile(CostModel(1e-3, 1e-15), CostModel(1e-3, 1e-15))
    assert sync.choose(SMALL, CLUSTER, profile=slow_messages).algorithm == "tree"
    choice = sync.choose(LARGE, sixes, profile=slow_bytes, across="tree")
    assert (choice.algorithm, choice.across) == ("hierarchical", "tree")
    assert "predicted from the measured links" in choice.reason


@pytest.mark.parametrize(
    ("profile", "missing"),
    [
        (Profile(CostModel(1e-5, 1e-11), CostModel(0, 0)), "slow.seconds_per_byte"),
        (Profile(CostModel(1e-5, 0), CostModel(1e-5, 1e-8)), "fast.seconds_per_byte"),
        (Profile(CostModel(1e-5, 1e-11), CostModel(0, 1e-8), 1e-3), "slow.seconds_per_message"),
    ],
)
def test_links_that_a_fit_took_to_be_free_are_not_followed(profile, missing):
    """As one-sided measurements give: of one node, of one size, or of nothing but noise."""
    for gradient in (LARGE, SMALL):
        choice = sync.choose(gradient, CLUSTER, profile=profile)
        expected = sync.choose(gradient, CLUSTER)
        assert choice[:3] == expected[:3]
        assert choice.reason == f"{expected.reason} (the profile is not followed: it has 0 for {missing})"


def test_a_link_that_is_not_crossed_need_not_have_been_measured():
    within = Profile(CostModel(1e-5, 1e-10), CostModel(0, 0))
    one_node, nodes_of_one = CLUSTER._replace(num_nodes=1), CLUSTER._replace(devices_per_node=1)
    assert "predicted from the measured links" in sync.choose(LARGE, one_node, profile=within).reason
    across = Profile(within.slow, within.fast)
    assert "predicted from the measured links" in sync.choose(LARGE, nodes_of_one, profile=across).reason


def test_measured_links_decide_on_one_host_too_and_say_what_a_step_will_take():
    slow_bytes = Profile(CostModel(0, 1e-11), CostModel(1e-12, 1e-8), seconds_per_exchange=1.0)
    one_host = Links(2, 4, 8, "cpu", num_hosts=1)
    assert sync.choose(LARGE, one_host, profile=slow_bytes).algorithm != "xla"
    for links, algorithm in ((CLUSTER, "ring"), (CLUSTER, "auto"), (Links(2, 4, 1, "cpu"), "auto")):
        choice = sync.choose(LARGE, links, algorithm=algorithm, profile=slow_bytes)
        counted = sync.traffic(
            LARGE, *links[:2], algorithm=choice.algorithm, across=choice.across, bucket_mib=choice.bucket_mib
        )
        milliseconds = 1e3 * sync.predict(slow_bytes, counted)
        assert f"to take {milliseconds:.3g} ms a step" in choice.reason
    assert "in one process" in choice.reason


def test_what_is_given_stays():
    choice = sync.choose(LARGE, CLUSTER, algorithm="ring", bucket_mib=3.0)
    assert (choice.algorithm, choice.bucket_mib) == ("ring", 3.0)
    assert sync.choose(LARGE, CLUSTER, algorithm="hierarchical").across == "xla"


@pytest.mark.parametrize(("nodes", "local", "mib"), [(1, 1, 4), (2, 1, 8), (2, 2, 16), (2, 4, 32), (8, 8, 32)])
def test_a_rings_buckets_grow_with_it_up_to_a_limit(nodes, local, mib):
    links = CLUSTER._replace(num_nodes=nodes, devices_per_node=local)
    assert sync.choose(LARGE, links, algorithm="ring").bucket_mib == mib
    assert sync.choose(LARGE, links, algorithm="hierarchical", across="ring").bucket_mib == 4


def test_automatic_buckets_have_one_size_within_a_process_too():
    for links in (CLUSTER, Links(2, 4, 1, "cpu")):
        assert sync.choose(LARGE, links).bucket_mib == 4
