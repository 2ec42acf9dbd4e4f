"""Resolvers, in recorded environments, against what those of TensorFlow do."""

import json
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

import replicax as rx
from replicax.cluster.resolvers._slurm import expand_counts, expand_nodes
from replicax.cluster_resolver import (
    ClusterResolver,
    KubernetesClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    UnionClusterResolver,
    UnionResolver,
)
from replicax.errors import ClusterError

WORKERS = ["host0:2222", "host1:2222"]
VARIABLES = ("TF_CONFIG", "HOSTNAME", "CUDA_VISIBLE_DEVICES")
PREFIXES = ("SLURM_", "JOB", "REPLICA", "KUBERNETES_")


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch):
    """Whatever runs these tests may be a Slurm step or a pod itself."""
    for name in list(os.environ):
        if name in VARIABLES or name.startswith(PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def environment(monkeypatch):
    def set_all(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.fixture
def tf_config(monkeypatch):
    def set_to(config):
        text = config if isinstance(config, str) else json.dumps(config)
        monkeypatch.setenv("TF_CONFIG", text)

    return set_to


# The base


class Fixed(ClusterResolver):
    def cluster_spec(self):
        return rx.ClusterSpec({"worker": WORKERS})

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return "host0:2222"


def test_a_resolver_of_ones_own_needs_two_methods():
    resolver = Fixed()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.environment == ""
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", "1", "grpc"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()  # pyright: ignore[reportAbstractUsage]: that is the point


def test_cpus_are_no_accelerators():
    assert Fixed().num_accelerators() == {}


def test_accelerators_are_counted_by_kind(monkeypatch):
    devices = [SimpleNamespace(platform=kind) for kind in ("gpu", "gpu", "cpu", "tpu")]
    monkeypatch.setattr("jax.local_devices", lambda: devices)
    assert Fixed().num_accelerators("worker", 1) == {"GPU": 2, "TPU": 1}
    assert TFConfigClusterResolver().num_accelerators() == {"GPU": 2, "TPU": 1}


@pytest.mark.parametrize("make", [Fixed, TFConfigClusterResolver, KubernetesClusterResolver])
def test_a_task_that_cannot_be_one_is_refused(make):
    resolver = make()
    with pytest.raises(
        ClusterError, match=r"index in its job, 0 or more; got -1\. Give an integer"
    ):
        resolver.task_id = -1
    with pytest.raises(ClusterError, match="type of a task is the name of its job; got 3"):
        resolver.task_type = 3


# SimpleClusterResolver


@pytest.mark.parametrize("cluster", [{"worker": WORKERS}, rx.ClusterSpec({"worker": WORKERS})])
def test_simple_answers_with_what_it_was_given(cluster):
    resolver = SimpleClusterResolver(
        cluster,
        "master:1",
        task_type="worker",
        task_id=1,
        environment="lab",
        num_accelerators={"GPU": 8},
        rpc_layer="grpc",
    )
    assert resolver.cluster_spec() == rx.ClusterSpec({"worker": WORKERS})
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("lab", "grpc")
    assert resolver.num_accelerators("worker", 0) == {"GPU": 8}
    assert resolver.master() == "grpc://master:1"
    assert resolver.master("worker", 0) == "grpc://host0:2222"
    assert resolver.master("worker", 0, rpc_layer="test") == "test://host0:2222"


def test_simple_knows_nothing_by_itself():
    resolver = SimpleClusterResolver({"worker": WORKERS})
    assert (resolver.master(), resolver.num_accelerators()) == ("", {})
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)


def test_simple_refuses_what_fits_nowhere():
    with pytest.raises(ClusterError, match="A cluster is a dict"):
        SimpleClusterResolver(WORKERS)
    with pytest.raises(ClusterError, match=r"A master is the address of a task; got 3\. Give a"):
        SimpleClusterResolver({"worker": WORKERS}, master=3)
    with pytest.raises(ClusterError, match="no task 7 in job 'worker'"):
        SimpleClusterResolver({"worker": WORKERS}).master("worker", 7)


# TFConfigClusterResolver


@pytest.mark.parametrize(
    ("cluster", "task", "expected"),
    [
        ({"worker": WORKERS}, {"type": "worker", "index": 1}, ("worker", 1, "host1:2222")),
        ({"worker": WORKERS}, {"type": "worker", "index": "1"}, ("worker", 1, "host1:2222")),
        (
            {"chief": ["host9:2222"], "worker": WORKERS},
            {"type": "chief", "index": 0},
            ("chief", 0, "host9:2222"),
        ),
        (
            {"chief": ["host9:2222"], "worker": WORKERS},
            {"type": "worker", "index": 0},
            ("worker", 0, "host0:2222"),
        ),
        (
            {"worker": WORKERS, "ps": ["host8:2222"]},
            {"type": "ps", "index": 0},
            ("ps", 0, "host8:2222"),
        ),
        (
            {"worker": {"1": "host1:2222", "4": "host4:2222"}},
            {"type": "worker", "index": 4},
            ("worker", 4, "host4:2222"),
        ),
        ({"worker": WORKERS[:1]}, {"type": "worker", "index": 0}, ("worker", 0, "")),
    ],
)
def test_tf_config_says_the_cluster_and_the_task(tf_config, cluster, task, expected):
    tf_config({"cluster": cluster, "task": task})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == rx.ClusterSpec(cluster)
    assert (resolver.task_type, resolver.task_id, resolver.master()) == expected
    assert (resolver.rpc_layer, resolver.environment) == (None, "")


def test_an_evaluator_is_a_task_outside_of_the_cluster(tf_config):
    tf_config({"cluster": {"worker": WORKERS}, "task": {"type": "evaluator", "index": 0}})
    resolver = TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id) == ("evaluator", 0)
    assert resolver.cluster_spec().jobs == ["worker"]
    with pytest.raises(ClusterError, match="no job 'evaluator'"):
        resolver.master()


@pytest.mark.parametrize("config", [None, {}, {"task": None}])
def test_without_tf_config_the_cluster_is_empty(tf_config, config):
    if config is not None:
        tf_config(config)
    resolver = TFConfigClusterResolver()
    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")


def test_without_a_task_only_the_cluster_is_known(tf_config):
    tf_config({"cluster": {"worker": WORKERS}})
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": WORKERS}
    assert (resolver.task_type, resolver.task_id) == (None, None)
    assert resolver.master("worker", 1) == "host1:2222"
    with pytest.raises(ClusterError, match="does not say which task"):
        resolver.master()


def test_without_an_index_only_the_type_is_known(tf_config):
    tf_config({"cluster": {"worker": WORKERS}, "task": {"type": "worker"}})
    assert TFConfigClusterResolver().task_type == "worker"
    assert TFConfigClusterResolver().task_id is None


def test_arguments_go_before_tf_config(tf_config):
    tf_config(
        {
            "cluster": {"worker": WORKERS},
            "task": {"type": "chief", "index": 0},
            "rpc_layer": "grpc",
            "environment": "cloud",
        }
    )
    resolver = TFConfigClusterResolver()
    assert (resolver.rpc_layer, resolver.environment) == ("grpc", "cloud")
    assert resolver.master("worker", 0) == "grpc://host0:2222"
    resolver = TFConfigClusterResolver("worker", 1, rpc_layer="test", environment="lab")
    assert (resolver.rpc_layer, resolver.environment) == ("test", "lab")
    assert resolver.master() == "test://host1:2222"
    resolver.task_id, resolver.rpc_layer = 0, "other"
    assert resolver.master() == "other://host0:2222"


def test_a_session_master_goes_before_everything(tf_config):
    tf_config({"cluster": {"worker": WORKERS}, "session_master": "host7:1"})
    assert TFConfigClusterResolver().master("worker", 1) == "host7:1"


def test_tf_config_is_read_each_time(tf_config):
    resolver = TFConfigClusterResolver()
    tf_config({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 0}})
    assert resolver.task_id == 0
    tf_config({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 1}})
    assert resolver.task_id == 1


def task(**fields):
    return {"cluster": {"worker": WORKERS}, "task": fields}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{'cluster': 1}", r"It is not JSON \(.*\); got \"{'cluster': 1}\"\. Set it to"),
        ("", r"It is not JSON \(.*\); got ''.*or unset it"),
        ("[1, 2]", r"JSON, but not an object; got '\[1, 2\]'"),
        ('"worker"', "JSON, but not an object"),
        ({"cluster": WORKERS}, r'"cluster" is not an object of job names.*got .*host0:2222'),
        ({"cluster": {"worker": "host0"}}, "TF_CONFIG cannot be used.*'worker' has 'host0'"),
        ({"cluster": {"worker": [1]}}, "TF_CONFIG cannot be used.*task 0 of job 'worker' has 1"),
        ({"task": "worker"}, '"task" is not an object with a type and an index; got'),
        (task(index=0), 'The field "task" has no "type"; got'),
        (task(), 'The field "task" has no "type"; got'),
        (task(type=[3], index=0), "type of the task is not a string"),
        (task(type="worker", index="one"), "index of the task is not an integer.*got .*one"),
        (task(type="worker", index=1.5), "index of the task is not an integer, 0 or more"),
        (task(type="worker", index=-1), "index of the task is not an integer, 0 or more"),
        (task(type="worker", index=True), "index of the task is not an integer, 0 or more"),
        (task(type="worker", index=None), "index of the task is not an integer, 0 or more"),
        (task(type="worker", index=10**9), "0 or more and at most 1000000; got"),
        (task(type="worker", index="9" * 5000), "index of the task is not an integer, 0 or more"),
        ('{"task": {"index": ' + "9" * 5000 + "}}", r"It is not JSON \(Exceeds the limit"),
        ('{"a": [Infinity]}', r"It is not JSON \(Infinity is no number of JSON\); got"),
        ('{"a": NaN}', r"It is not JSON \(NaN is no number of JSON\); got"),
        ("[" * 100_000, "It is nested too deeply; got"),
        ({"cluster": {"worker": {"10000000000": "a:1"}}}, "an integer, 0 or more and at most"),
        ({"cluster": {"worker": {"9" * 5000: "a:1"}}}, "has a task '9999"),
        ({"rpc_layer": 3}, '"rpc_layer" is not a string'),
        ({"environment": ["cloud"]}, '"environment" is not a string'),
        ({"session_master": 1}, '"session_master" is not a string'),
    ],
)
def test_a_wrong_tf_config_is_refused(tf_config, config, message):
    tf_config(config)
    resolver = TFConfigClusterResolver()
    with pytest.raises(ClusterError, match=message):
        _ = (
            resolver.cluster_spec(),
            resolver.task_type,
            resolver.task_id,
            resolver.rpc_layer,
            resolver.environment,
            resolver.master(),
        )


def test_a_long_tf_config_is_shortened_in_messages(tf_config):
    tf_config({"cluster": {"worker": [f"host{i}:2222" for i in range(1000)]}, "task": 1})
    with pytest.raises(ClusterError) as caught:
        _ = TFConfigClusterResolver().task_type
    assert len(str(caught.value)) < 500


# SlurmClusterResolver


def step(nodes, tasks_per_node, rank, count):
    return {
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
        "SLURM_STEP_NUM_TASKS": str(count),
        "SLURM_PROCID": str(rank),
    }


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("node1", ["node1"]),
        ("t02n13,t02n41", ["t02n13", "t02n41"]),
        ("node[1-3,7],other05", ["node1", "node2", "node3", "node7", "other05"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1-2],m5,o[3-4,6,7-9]", ["n1", "n2", "m5", "o3", "o4", "o6", "o7", "o8", "o9"]),
        ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
        ("n[1-2]-ib.local,z", ["n1-ib.local", "n2-ib.local", "z"]),
    ],
)
def test_lists_of_nodes(text, nodes):
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(
    "text", ["n[1-2", "n1-2]", "n[a-b]", "n[3-1]", "n[]", "n1,,n2", ",n1", "n[1,]", "n[1-2-3]"]
)
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(ClusterError, match=r"looks like 'node\[1-3,7\],other05'; got .*srun"):
        expand_nodes(text)


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("3(x2),2,1", [3, 3, 2, 1])]
)
def test_lists_of_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["1(2)", "x3", "2(x)", "1,,2", "-1"])
def test_what_is_no_list_of_counts_is_refused(text):
    with pytest.raises(ClusterError, match=r"list of numbers such as '2\(x3\),1'; got"):
        expand_counts(text)


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        (step("node1", "1", 0, 1), ["node1:8888"]),
        (step("node1", "3", 2, 3), ["node1:8888", "node1:8889", "node1:8890"]),
        (step("n[9-11]", "1(x3)", 1, 3), ["n9:8888", "n10:8888", "n11:8888"]),
        (
            step("node[08-09],other05", "2(x2),1", 4, 5),
            ["node08:8888", "node08:8889", "node09:8888", "node09:8889", "other05:8888"],
        ),
    ],
)
def test_the_tasks_of_a_slurm_step_are_workers(environment, variables, workers):
    environment(variables)
    resolver = SlurmClusterResolver()
    rank = int(variables["SLURM_PROCID"])
    assert resolver.cluster_spec().as_dict() == {"worker": workers}
    assert resolver.get_task_info() == (resolver.task_type, resolver.task_id) == ("worker", rank)
    assert resolver.master() == f"grpc://{workers[rank]}"
    assert resolver.master("worker", 0, rpc_layer="test") == f"test://{workers[0]}"
    assert resolver.num_accelerators() == {}
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("rank", "expected"),
    [(0, ("chief", 0)), (1, ("ps", 0)), (2, ("worker", 0)), (3, ("worker", 1))],
)
def test_slurm_ranks_go_to_jobs_by_their_names(environment, rank, expected):
    environment(step("n[1-4]", "1(x4)", rank, 4))
    resolver = SlurmClusterResolver({"worker": 2, "ps": 1, "chief": 1}, port_base=7000)
    assert resolver.get_task_info() == expected
    assert resolver.cluster_spec().as_dict() == {
        "chief": ["n1:7000"],
        "ps": ["n2:7000"],
        "worker": ["n3:7000", "n4:7000"],
    }


def test_the_nodes_of_the_job_stand_in_for_those_of_the_step(environment):
    variables = step("", "1(x2)", 0, 2)
    environment(variables | {"SLURM_JOB_NODELIST": "n[1-2]"})
    assert SlurmClusterResolver().cluster_spec().task_address("worker", 1) == "n2:8888"


@pytest.mark.parametrize("tasks_per_node", [2, {"n1": 2, "n2": 2}])
def test_tasks_of_nodes_can_be_given(environment, tasks_per_node):
    environment({"SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "n[1-2]"})
    resolver = SlurmClusterResolver({"worker": 4}, tasks_per_node=tasks_per_node)
    assert resolver.cluster_spec().job_tasks("worker") == [
        "n1:8888",
        "n1:8889",
        "n2:8888",
        "n2:8889",
    ]


@pytest.mark.parametrize(
    ("variables", "arguments", "visible", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {}, "2,3", 2),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, {}, "6,7", 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"gpus_per_task": 1}, "1", 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, {"auto_set_gpu": False}, "0,1,2,3", 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, {}, "0,1", 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_LOCALID": "0"}, {}, "0,1", 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, "", 0),
    ],
)
def test_a_slurm_task_sees_its_own_gpus(environment, variables, arguments, visible, gpus):
    environment(step("n1", "2", 1, 2) | variables)
    resolver = SlurmClusterResolver(**arguments)
    for _ in range(2):  # asking again narrows them no further
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == visible
    assert resolver.num_accelerators().get("GPU", 0) == gpus


def test_a_slurm_task_without_gpus_of_its_own_is_refused(environment):
    environment(
        step("n1", "4", 3, 4) | {"CUDA_VISIBLE_DEVICES": "0,1,2", "SLURM_GPUS_ON_NODE": "4"}
    )
    with pytest.raises(ValueError, match="after the first 3, but only 3 are visible"):
        SlurmClusterResolver().cluster_spec()


def test_slurm_gpus_are_counted_where_none_are_named(environment, monkeypatch):
    environment(step("n1", "2", 1, 2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "restored afterwards")
    del os.environ["CUDA_VISIBLE_DEVICES"]
    SlurmClusterResolver(gpus_per_node=4).cluster_spec()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("SLURM_PROCID", {}),
        ("SLURM_STEP_NUM_TASKS", {}),
        ("SLURM_STEP_TASKS_PER_NODE", {}),
        ("SLURM_STEP_NODELIST or SLURM_JOB_NODELIST", {}),
        ("SLURM_STEP_NODELIST or SLURM_JOB_NODELIST", {"tasks_per_node": 1}),
    ],
)
def test_outside_of_slurm_the_missing_variable_is_named(environment, missing, arguments):
    variables = step("n1", "1", 0, 1)
    del variables[missing.partition(" ")[0]]
    environment(variables)
    with pytest.raises(
        ClusterError, match=f"variable {missing} is needed.*not set. Start .*`srun`"
    ):
        SlurmClusterResolver(**arguments)


@pytest.mark.parametrize(
    ("variables", "arguments", "message"),
    [
        (
            step("n1", "1", 0, 2),
            {},
            r"jobs need 2 task\(s\), {'worker': 2}; Slurm runs 1.*--ntasks",
        ),
        (step("n1", "2", 0, 2), {"jobs": {"ps": 3}}, r"jobs need 3 task\(s\).*Slurm runs 2"),
        (step("n[1-2]", "1", 0, 1), {}, r"lists 2 node\(s\).*numbers of tasks of 1"),
        (step("n1", "1", 4, 1), {}, "SLURM_PROCID is below the number of tasks; got 4 of 1"),
        (step("n1", "1", "x", 1), {}, "SLURM_PROCID is a number, 0 or more; got 'x'"),
        (
            step("n1", "2", 0, 2),
            {"gpus_per_node": 4, "gpus_per_task": 3},
            r"2 tasks on a node with 3 GPU\(s\) each need 6; a node has 4. Lower `gpus_per_task`",
        ),
    ],
)
def test_a_slurm_step_that_contradicts_itself_is_refused(
    environment, variables, arguments, message
):
    environment(variables)
    with pytest.raises(ClusterError, match=message):
        SlurmClusterResolver(**arguments)


# KubernetesClusterResolver


def pod(name, phase="Running", **addresses):
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase=phase, **addresses)
    )


class Client:
    def __init__(self, **pods):
        self.pods = {name.replace("_", "="): found for name, found in pods.items()}

    def list_pod_for_all_namespaces(self, label_selector):
        return SimpleNamespace(items=self.pods[label_selector])


@pytest.fixture
def package(monkeypatch):
    """A package `kubernetes` with pods of the default label, that says how it was configured."""
    calls = []
    client, config = ModuleType("kubernetes.client"), ModuleType("kubernetes.config")
    found = Client()
    found.pods["job-name=tensorflow"] = [pod("tensorflow-x", pod_ip="10.0.0.1")]
    client.CoreV1Api = lambda: found
    config.load_incluster_config = lambda: calls.append("in cluster")
    config.load_kube_config = lambda: calls.append("kube config")
    kubernetes = ModuleType("kubernetes")
    kubernetes.client, kubernetes.config = client, config
    kubernetes.__spec__ = ModuleSpec("kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes", kubernetes)
    return calls


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)


def test_pods_are_found_by_their_labels_and_ordered_by_name():
    client = Client(
        app_a=[pod("a-1", host_ip="10.0.0.2"), pod("a-0", host_ip="10.0.0.1")],
        app_b=[pod("0", host_ip="10.0.0.3")],
        app_ps=[pod("ps", host_ip="10.0.0.4")],
    )
    resolver = KubernetesClusterResolver(
        {"worker": ["app=a", "app=b"], "ps": ["app=ps"]}, 1234, override_client=client
    )
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:1234", "10.0.0.2:1234", "10.0.0.3:1234"],
        "ps": ["10.0.0.4:1234"],
    }
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "grpc://10.0.0.2:1234"
    assert resolver.master("ps", 0, rpc_layer="test") == "test://10.0.0.4:1234"


def test_pods_are_reached_at_their_own_address():
    client = Client(app_a=[pod("a", pod_ip="172.16.0.5", host_ip="10.0.0.1")])
    resolver = KubernetesClusterResolver({"worker": ["app=a"]}, override_client=client)
    assert resolver.master("worker", 0) == "grpc://172.16.0.5:8470"


@pytest.mark.parametrize("phase", ["Pending", "Failed", "Succeeded", "Unknown"])
def test_every_pod_has_to_run(phase):
    client = Client(app_a=[pod("a-0", host_ip="10.0.0.1"), pod("a-1", phase)])
    resolver = KubernetesClusterResolver({"worker": ["app=a"]}, override_client=client)
    with pytest.raises(ClusterError, match=f"job 'worker'.*pod 'a-1' is in phase '{phase}'. Wait"):
        resolver.cluster_spec()


def test_a_job_without_pods_is_refused():
    resolver = KubernetesClusterResolver({"worker": ["app=a"]}, override_client=Client(app_a=[]))
    with pytest.raises(ClusterError, match=r"'worker' has no pods.*\['app=a'\].*kubectl"):
        resolver.cluster_spec()


def test_the_package_finds_pods_of_the_default_label(package, monkeypatch):
    resolver = KubernetesClusterResolver()
    assert resolver.cluster_spec().as_dict() == {"worker": ["10.0.0.1:8470"]}
    assert package == ["kube config"]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    resolver.cluster_spec()
    assert package == ["kube config", "in cluster"]


@pytest.mark.usefixtures("no_package")
def test_labels_need_the_package():
    with pytest.raises(ClusterError, match=r"`kubernetes`; it is not installed.*pip install"):
        KubernetesClusterResolver({"worker": ["app=a"]}).cluster_spec()


INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "2",
    "HOSTNAME": "train-mnist-2",
    "REPLICAX_NUM_WORKERS": "3",
    "REPLICAX_SUBDOMAIN": "pods",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "HOSTNAME": "train-workers-1-1",
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "workers",
    "REPLICATED_JOB_REPLICAS": "2",
    "JOB_INDEX": "1",
    "JOB_GLOBAL_INDEX": "1",
    "REPLICAX_NUM_WORKERS": "4",
}


@pytest.mark.parametrize("installed", ["no_package", "package"])
def test_an_indexed_job_is_known_by_its_environment(request, environment, installed):
    request.getfixturevalue(installed)
    environment(INDEXED_JOB)
    resolver = KubernetesClusterResolver()
    assert resolver.cluster_spec().as_dict() == {
        "worker": [f"train-mnist-{index}.pods:8470" for index in range(3)]
    }
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.master() == "grpc://train-mnist-2.pods:8470"


def test_the_number_of_workers_and_the_subdomain_can_be_given(environment):
    environment({"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "train-0"})
    resolver = KubernetesClusterResolver(tf_server_port=99, num_workers=2, subdomain="svc")
    assert resolver.cluster_spec().job_tasks("worker") == ["train-0.svc:99", "train-1.svc:99"]
    resolver.task_type, resolver.task_id = "chief", 5
    assert (resolver.task_type, resolver.task_id) == ("chief", 5)


@pytest.mark.parametrize("subdomain", ["train", "other"])
def test_a_jobset_is_known_by_its_environment(environment, subdomain):
    environment(JOBSET)
    if subdomain != JOBSET["JOBSET_NAME"]:
        environment({"REPLICAX_SUBDOMAIN": subdomain})
    resolver = KubernetesClusterResolver()
    assert resolver.cluster_spec().job_tasks("worker") == [
        f"train-workers-{host}.{subdomain}:8470" for host in ("0-0", "0-1", "1-0", "1-1")
    ]
    assert (resolver.task_type, resolver.task_id) == ("worker", 3)


def test_a_jobset_has_one_job_unless_told_otherwise(environment):
    environment({n: v for n, v in JOBSET.items() if n != "REPLICATED_JOB_REPLICAS"})
    environment({"JOB_INDEX": "0", "REPLICAX_NUM_WORKERS": "2"})
    resolver = KubernetesClusterResolver()
    assert resolver.cluster_spec().task_address("worker", 1) == "train-workers-0-1.train:8470"
    assert resolver.task_id == 1


@pytest.mark.parametrize(
    ("variables", "missing", "advice"),
    [
        (INDEXED_JOB, "JOB_COMPLETION_INDEX", 'completionMode: "Indexed"'),
        (INDEXED_JOB, "REPLICAX_NUM_WORKERS", "number of pods"),
        (INDEXED_JOB, "REPLICAX_SUBDOMAIN", "headless service"),
        (INDEXED_JOB, "HOSTNAME", "host name of the pod"),
        (JOBSET, "REPLICATED_JOB_NAME", "jobset.sigs.k8s.io/replicatedjob-name"),
        (JOBSET, "JOB_INDEX", "jobset.sigs.k8s.io/job-index"),
    ],
)
@pytest.mark.usefixtures("no_package")
def test_outside_of_numbered_pods_the_missing_variable_is_named(
    environment, variables, missing, advice
):
    environment({name: value for name, value in variables.items() if name != missing})
    resolver = KubernetesClusterResolver()
    with pytest.raises(ClusterError, match=f"variable {missing} is needed.*not set.*{advice}"):
        resolver.cluster_spec()


@pytest.mark.usefixtures("no_package")
def test_outside_of_kubernetes_no_task_is_known():
    assert KubernetesClusterResolver().task_type is None
    assert KubernetesClusterResolver().task_id is None


@pytest.mark.parametrize(
    ("variables", "changes", "message"),
    [
        (INDEXED_JOB, {"HOSTNAME": "gke-node-7"}, "is '<job>-2'; HOSTNAME is 'gke-node-7'"),
        (INDEXED_JOB, {"REPLICAX_NUM_WORKERS": "two"}, "REPLICAX_NUM_WORKERS is a number.*'two'"),
        (INDEXED_JOB, {"REPLICAX_NUM_WORKERS": "0"}, r"got 0 worker\(s\) for 1 Job"),
        (INDEXED_JOB, {"REPLICAX_NUM_WORKERS": "2"}, r"pod 2 of Job 0; there are 2 worker\(s\)"),
        (JOBSET, {"REPLICAX_NUM_WORKERS": "5"}, r"got 5 worker\(s\) for 2 Job\(s\)"),
        (JOBSET, {"JOB_INDEX": "2"}, "pod 1 of Job 2; there are 2"),
        (JOBSET, {"REPLICATED_JOB_REPLICAS": "0"}, "for 0 Job"),
    ],
)
def test_numbered_pods_that_contradict_themselves_are_refused(
    environment, variables, changes, message
):
    environment(variables | changes)
    with pytest.raises(ClusterError, match=message):
        KubernetesClusterResolver().cluster_spec()


# UnionResolver


def simple(cluster, **arguments):
    return SimpleClusterResolver(cluster, **arguments)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"worker": ["a", "b"]}, {"ps": ["c"]}, {"worker": ["a", "b"], "ps": ["c"]}),
        ({"worker": ["a", "b"]}, {"worker": ["c"]}, {"worker": ["a", "b", "c"]}),
        ({"worker": ["a", "b"]}, {"worker": ["a", "b"]}, {"worker": ["a", "b"]}),
        ({"worker": {1: "b"}}, {"worker": {3: "d"}}, {"worker": {1: "b", 3: "d"}}),
        ({"worker": {2: "c"}}, {"worker": ["a", "b"]}, {"worker": ["a", "b", "c"]}),
        ({"worker": {1: "b"}}, {"worker": ["a", "b"]}, {"worker": ["a", "b"]}),
        ({}, {"worker": ["a"]}, {"worker": ["a"]}),
    ],
)
def test_clusters_are_put_together(first, second, expected):
    union = UnionResolver(simple(first), simple(second))
    assert union.cluster_spec().as_dict() == expected


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"worker": {1: "b"}}, {"worker": {1: "x"}}, "task 1 of job 'worker'.*'b' for one and 'x'"),
        ({"worker": ["a", "b"]}, {"worker": {0: "x", 5: "y"}}, "task 0 of job 'worker'.*'a' for"),
        ({"worker": ["a", "b"]}, {"worker": ["b", "c"]}, "job 'worker': b is in lists that differ"),
    ],
)
def test_clusters_that_disagree_are_refused(first, second, message):
    with pytest.raises(ClusterError, match=message):
        UnionResolver(simple(first), simple(second)).cluster_spec()


def test_the_first_that_knows_answers():
    unknowing = simple({"ps": ["p:1"]}, num_accelerators={"GPU": 1}, environment="lab")
    knowing = simple(
        {"worker": WORKERS}, master="master:1", task_type="worker", task_id=1, rpc_layer="grpc"
    )
    union = UnionResolver(unknowing, knowing)
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 1, "grpc")
    assert (union.environment, union.num_accelerators()) == ("lab", {"GPU": 1})
    assert union.master() == "grpc://master:1"
    assert union.master("ps", 0) == "grpc://p:1"
    assert union.master("ps", 0, rpc_layer="test") == "test://p:1"
    union.task_type, union.task_id, union.rpc_layer = "ps", 0, "other"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "other")
    assert union.master() == "other://master:1"


def test_nobody_may_know():
    union = UnionResolver(simple({"ps": ["p:1"]}), simple({"worker": WORKERS}))
    assert (union.task_type, union.task_id, union.rpc_layer, union.master()) == (
        None,
        None,
        None,
        "",
    )


def test_arguments_of_a_union_go_first():
    given = simple({"worker": WORKERS}, task_type="worker", task_id=1, rpc_layer="grpc")
    union = UnionResolver(given, rpc_layer="test", task_type="worker", task_id=0)
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "test")


def test_a_task_moves_with_the_list_it_is_in():
    later = simple({"worker": ["c", "d"]}, task_type="worker", task_id=1)
    union = UnionResolver(simple({"worker": ["a", "b"]}), later)
    assert union.task_id == 3
    assert union.cluster_spec().task_address("worker", 3) == "d"
    evaluator = simple({"worker": ["c"]}, task_type="evaluator", task_id=0)
    assert UnionResolver(simple({"worker": ["a"]}), evaluator).task_id == 0


def test_accelerators_of_tf_config_can_be_overridden(tf_config):
    tf_config({"cluster": {"worker": WORKERS}, "task": {"type": "worker", "index": 1}})
    told = TFConfigClusterResolver()
    union = UnionClusterResolver(simple(told.cluster_spec(), num_accelerators={"GPU": 1}), told)
    assert union.num_accelerators() == {"GPU": 1}
    assert union.cluster_spec() == told.cluster_spec()
    assert (union.task_type, union.task_id) == ("worker", 1)


@pytest.mark.parametrize(
    ("resolvers", "received"), [((), "none"), (({"worker": WORKERS},), "{'worker'")]
)
def test_a_union_of_no_resolvers_is_refused(resolvers, received):
    with pytest.raises(ClusterError, match=f"one or more cluster resolvers; got {received}"):
        UnionResolver(*resolvers)


def test_the_name_of_a_job_may_be_a_number(monkeypatch):
    config = {"cluster": {"3": ["a:1", "b:1"]}, "task": {"type": 3, "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == ("3", 1, "b:1")
