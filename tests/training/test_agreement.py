from lockstep.keras.worker_exchange import describe_difference


def test_equal_facts_have_no_difference() -> None:
    assert describe_difference((0, 1), [{"call": "fit 1"}, {"call": "fit 1"}]) is None


def test_the_first_difference_names_both_workers_the_fact_and_a_remedy() -> None:
    facts = [
        {"call": "fit 1", "variable a": "1", "variable b": "2"},
        {"call": "fit 1", "variable a": "1", "variable b": "2"},
        {"call": "fit 1", "variable a": "1", "variable b": "3"},
    ]
    text = describe_difference((0, 1, 5), facts)
    assert text is not None
    assert text.startswith("worker 0 has variable b = 2 where worker 5 has 3; the models differ")


def test_a_fact_that_only_one_worker_has_is_a_difference() -> None:
    text = describe_difference((0, 1), [{"call": "fit 1"}, {"call": "fit 1", "variable b": "3"}])
    assert text is not None
    assert text.startswith("worker 0 has variable b = nothing where worker 1 has 3")


def test_data_that_differ_between_hosts_are_looked_for_in_files_first() -> None:
    facts = [{"data sample": "1"}, {"data sample": "1"}, {"data sample": "2"}]
    text = describe_difference((0, 1, 2), facts, ("node1", "node1", "node2"))
    assert text is not None
    assert (
        "worker 0 has data sample = 1 where worker 2 has 2; the data files may differ between node1 and "
        "node2: compare them first, for example with sha256sum; if they are equal, the workers read different"
    ) in text
    text = describe_difference((0, 1, 2), [facts[0], facts[2], facts[0]], ("node1", "node1", "node2"))
    assert text is not None
    assert "files may differ" not in text
    text = describe_difference((0, 1), [{"variable a": "1"}, {"variable a": "2"}], ("node1", "node2"))
    assert text is not None
    assert "files may differ" not in text
