"""`ClusterSpec`, against what `tf.train.ClusterSpec` does."""

import copy
import itertools
import pickle

import pytest

import replicax as rx

WORKERS = ["host0:2222", "host1:2222"]


def nested(depth):
    nest = []
    for _ in range(depth):
        nest = [nest]
    return nest


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"worker": WORKERS}, {"worker": WORKERS}),
        ({"worker": tuple(WORKERS)}, {"worker": WORKERS}),
        ({"worker": {1: WORKERS[1], 0: WORKERS[0]}}, {"worker": WORKERS}),
        ({"worker": {"0": WORKERS[0], "1": WORKERS[1]}}, {"worker": WORKERS}),
        ({"worker": {3: "host3:2222"}}, {"worker": {3: "host3:2222"}}),
        ({"worker": {2: "b", 0: "a"}, "ps": ["c"]}, {"worker": {0: "a", 2: "b"}, "ps": ["c"]}),
        ({"worker": []}, {"worker": {}}),
        ({}, {}),
    ],
)
def test_jobs_are_lists_where_every_task_is_known_and_else_dicts(given, expected):
    assert rx.ClusterSpec(given).as_dict() == expected
    assert rx.ClusterSpec(rx.ClusterSpec(given)).as_dict() == expected


def test_questions_about_jobs_and_tasks():
    cluster = rx.ClusterSpec({"worker": WORKERS, "ps": {2: "host2:2222", 0: "host3:2222"}})
    assert cluster.jobs == ["worker", "ps"]
    assert cluster.num_tasks("worker") == 2
    assert cluster.num_tasks("ps") == 2
    assert cluster.task_indices("ps") == [0, 2]
    assert cluster.task_address("ps", 2) == "host2:2222"
    assert cluster.job_tasks("worker") == WORKERS
    assert cluster.job_tasks("ps") == ["host3:2222", None, "host2:2222"]


def test_a_job_may_have_no_tasks():
    cluster = rx.ClusterSpec({"worker": []})
    assert cluster.num_tasks("worker") == 0
    assert cluster.job_tasks("worker") == []


def test_it_is_a_value():
    given = {"worker": list(WORKERS)}
    cluster = rx.ClusterSpec(given)
    assert cluster == rx.ClusterSpec({"worker": dict(enumerate(WORKERS))})
    assert cluster != rx.ClusterSpec({"worker": WORKERS[::-1]})
    assert cluster != given
    assert cluster
    assert not rx.ClusterSpec({})
    assert repr(cluster) == "ClusterSpec({'worker': ['host0:2222', 'host1:2222']})"
    assert pickle.loads(pickle.dumps(cluster)) == copy.deepcopy(cluster) == cluster

    given["worker"].append("host2:2222")
    cluster.as_dict()["worker"].append("host2:2222")
    cluster.jobs.append("ps")
    assert cluster.as_dict() == {"worker": WORKERS}


def test_its_representation_is_in_the_order_of_names_and_can_be_evaluated():
    cluster = rx.ClusterSpec({"worker": {1: "b"}, "chief": ["a"]})
    assert repr(cluster) == "ClusterSpec({'chief': ['a'], 'worker': {1: 'b'}})"
    assert eval(repr(cluster), {"ClusterSpec": rx.ClusterSpec}) == cluster


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "A cluster is a dict of job names.*got None.*Give something like"),
        (WORKERS, r"A cluster is a dict of job names.*got \['host0:2222'"),
        ({1: WORKERS}, "name of a job is a string; got 1"),
        ({"": WORKERS}, "name of a job is a string; got ''"),
        ({"worker": "host0:2222"}, "list of addresses.*job 'worker' has 'host0:2222'"),
        ({"worker": 3}, "list of addresses.*job 'worker' has 3"),
        ({"worker": {"one": "a"}}, "index of a task is an integer.*'worker' has a task 'one'"),
        ({"worker": {-1: "a"}}, "index of a task is an integer, 0 or more.*task -1"),
        ({"worker": {10**5000: "a"}}, "an integer, 0 or more.*task an int of 16610 bits"),
        ({"worker": 10**5000}, "'worker' has an int of 16610 bits"),
        ({"worker": [nested(100_000)]}, r"task 0 of job 'worker' has \[\["),
        ({"worker": {True: "a"}}, "index of a task is an integer.*task True"),
        ({"worker": {1: "a", "1": "b"}}, "one address.*an index occurs twice. Remove one"),
        ({"worker": ["a", None]}, "'host0:2222'; task 1 of job 'worker' has None"),
        ({"worker": ["a", " "]}, "'host0:2222'; task 1 of job 'worker' has ' '"),
        ({"worker": {4: 2222}}, "'host0:2222'; task 4 of job 'worker' has 2222"),
    ],
    ids=itertools.count(),
)
def test_what_is_no_cluster_is_refused(given, message):
    with pytest.raises(rx.errors.ClusterError, match=message):
        rx.ClusterSpec(given)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (lambda c: c.num_tasks("ps"), r"no job 'ps' in the cluster.*\['worker'\].*Ask for one"),
        (lambda c: c.task_indices("ps"), "no job 'ps'"),
        (lambda c: c.task_address("ps", 0), "no job 'ps'"),
        (lambda c: c.job_tasks("ps"), "no job 'ps'"),
        (lambda c: c.task_address("worker", 2), r"no task 2 in job 'worker'.*\[0, 1\].*Ask for"),
    ],
)
def test_what_is_not_in_the_cluster_is_refused(question, message):
    with pytest.raises(rx.errors.ClusterError, match=message):
        question(rx.ClusterSpec({"worker": WORKERS}))


def test_long_input_is_shortened_in_messages():
    with pytest.raises(rx.errors.ClusterError) as caught:
        rx.ClusterSpec({"worker": "host0:2222," * 1000})
    assert len(str(caught.value)) < 400
