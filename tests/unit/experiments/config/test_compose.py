"""Composition: every experiment at every scale, the resolvers, run ids and what may be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments import compare
from experiments.config import compose, rules
from experiments.runs import start
from launch.errors import UserError
from launch.local import LocalLauncher
from launch.spec import RunSpec
from tests.helpers.stub_run import with_gpus
from tests.helpers.tiers import slow

EXPERIMENTS = sorted(p.stem for p in (compose.CONF / "exp").glob("*.yaml"))


def resolved(*overrides: str) -> dict[str, Any]:
    return compose.resolve(compose.compose(overrides))


@pytest.mark.parametrize("scale", ["quick", slow("paper")])
@pytest.mark.parametrize("exp", EXPERIMENTS)
def test_every_experiment(exp: str, scale: str) -> None:
    config = resolved(f"+exp={exp}", f"scale={scale}")
    assert config["exp"] == exp
    assert config["scale"]["name"] == scale
    for key in ("batch_per_rank", "epochs"):
        assert config["train"][key] == config["scales"][scale][key]


@pytest.mark.slow
@pytest.mark.parametrize("exp", ["language_model", "methods_digits"])
def test_variants_that_only_these_experiments_have(exp: str) -> None:
    """Those of the others: test_experiments_more.py, test_workloads_conf.py, runs/test_all_methods.py."""
    for variant in compare.variants(compose.compose([f"+exp={exp}", "scale=quick"]), None):
        assert compose.resolve(variant)["exp"] == exp


def test_hyper_parameters_belong_to_the_selected_optimizer() -> None:
    """Those of the experiment's own optimizer do not leak into another; the command line wins over both."""
    assert "momentum" in resolved("+exp=resnet50", "optimizer=sgdm")["optimizer"]
    birder = resolved("+exp=resnet50", "optimizer=birder", "optimizer.beta=0.5")["optimizer"]
    assert birder["_target_"] == "birder.Birder"
    assert birder["beta"] == 0.5
    assert "momentum" not in birder


def test_learning_rate_rule() -> None:
    """ResNet-50, SGDM: lr = 0.1 * batch / 256 with the batch of all ranks, 32 on each of 4 x 8."""
    at = ["+exp=resnet50", "optimizer=sgdm", "scale=paper", "cluster.nodes=4"]
    assert resolved(*at)["optimizer"]["lr"] == pytest.approx(0.1 * 32 * 32 / 256)
    assert resolved(*at, "train.lr_batch=per_gpu")["optimizer"]["lr"] == pytest.approx(0.1 * 32 / 256)
    assert resolved(*at, "train.accumulate=2")["optimizer"]["lr"] == pytest.approx(0.1 * 2 * 32 * 32 / 256)


def test_the_warm_up_that_is_a_share_of_the_steps_is_one_on_any_number_of_nodes() -> None:
    """Wikipedia's run lasts a number of epochs: its steps depend on how many ranks there are."""
    warmup = resolved("+exp=wikipedia", "optimizer=onebit_adam", "scale=paper")["optimizer"]["warmup_steps"]
    assert warmup == 0.15


def test_scale_auto(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`paper` needs both a GPU and data."""
    with_gpus(monkeypatch, "0,1")
    assert resolved("+exp=resnet50")["scale"]["name"] == "quick"
    assert resolved("+exp=resnet50", f"data.path={tmp_path}")["scale"]["name"] == "paper"
    monkeypatch.setattr("launch.probe.any_gpu", lambda: False)  # shells set the variable where there is no GPU, too
    assert resolved("+exp=resnet50", f"data.path={tmp_path}")["scale"]["name"] == "quick"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolved("+exp=resnet50", f"data.path={tmp_path}")["scale"]["name"] == "quick"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.nodes=four", "cluster.nodes must be a whole number, 1 or more, not 'four'"),
        ("cluster.nodes=0", "cluster.nodes must be"),
        ("cluster.nodes=-1", "cluster.nodes must be"),
        ("cluster.nodes=1.5", "cluster.nodes must be"),
        ("cluster.nodes=true", "cluster.nodes must be"),
        ("cluster.ranks_per_node=0", "cluster.ranks_per_node must be"),
        ("cluster.backend=mpi", "cluster.backend must be one of auto, nccl, gloo"),
        ("train.batch_per_rank=0", "train.batch_per_rank must be"),
        ("train.epochs=-1", "train.epochs must be"),
        ("train.max_steps=0", "train.max_steps must be a whole number, 1 or more, or null"),
        ("train.precision=fp8", "train.precision must be one of fp32, tf32, bf16, fp16"),
        ("train.lr_schedule.name=cyclic", "train.lr_schedule.name must be one of constant, linear, cosine, "),
        ("train.lr_schedule.warmup=1.5", "train.lr_schedule.warmup must be a fraction of all steps"),
        ("train.max_grad_norm=0", "train.max_grad_norm must be"),
        ("seed=x", "seed must be"),
        ("seed=-1", "seed must be"),
        ("optimizer.lr=-0.1", "optimizer.lr must be"),
        ("optimizer.lr=nan", "optimizer.lr must be"),
        ("optimizer.lr=fast", "optimizer.lr must be a number of 0 or more, not 'fast'"),
        ("optimizer.beta=1.0", "optimizer.beta must be a number from 0 up to, but not including, 1"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay must be"),
        ("comm.topology=ring", "comm.topology must be one of flat, hierarchical"),
        ("checkpoint.keep=0", "checkpoint.keep must be"),
        ("wandb.mode=maybe", "wandb.mode must be one of"),
        ("resume=auto", "resume=auto needs run_name"),
        ("run_name=../x", "run_name names a folder"),
        ("scale.name=huge", "scale.name must be one of quick, paper, not 'huge'"),
    ],
)
def test_out_of_range(override: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        resolved("+exp=digits", override)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("betas", ["[0.9]", "[0.9,1.0]", "[-0.1,0.9]", "0.9"])
def test_betas(betas: str) -> None:
    with pytest.raises(UserError, match=r"optimizer\.betas must be two numbers"):
        resolved("+exp=digits", "optimizer=adamw", f"optimizer.betas={betas}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["+exp=bert_squat"],
            "no experiment 'bert_squat'; did you mean bert_squad? There are: bert_squad, ",
        ),  # the nearest first
        (["+exp=digts"], "; did you mean digits?"),
        (["optimizer=Bidrer"], "; did you mean birder?"),
        (["+exp=nothing"], f" and {len(EXPERIMENTS) - 12} more"),
        (["exp=digits"], "+exp=NAME"),
        (["optimizer=sgd"], "no optimizer 'sgd'; did you mean sgdm? There are: sgdm, "),  # the nearest first
        (["workload=mnist"], "no workload 'mnist'; there are: "),
        (["cluster=moon"], "no cluster 'moon'; there are: "),
        (["optimizer.lrr=1"], "did you mean optimizer.lr"),
        (["clutser.nodes=2"], "did you mean cluster.nodes"),
        (["momentun=2"], "no key 'momentun'"),
        (["+train.max_step=5"], "no key 'train.max_step' in the configuration; did you mean train.max_steps?"),
        (["++train.epoch=3"], "did you mean train.epochs?"),
        (["+checkpoint.evry=5"], "did you mean checkpoint.every?"),
        (["+evalute=false"], "did you mean evaluate?"),
        (["+optimizer.lrr=1"], "did you mean optimizer.lr"),
        (["+optimizer.nesterov=true"], "no key 'optimizer.nesterov'"),  # SGDM's, not Birder's
        (["+cluster.link_gbps=1"], "no key 'cluster.link_gbps'"),  # of cluster=emulated
        (["hparams=digits"], "no key 'hparams'"),
        (["~optimizer.lr"], "optimizer.lr is missing: it cannot be left out or removed"),
        (["~seed"], "seed is missing"),
        (["~train.epochs"], "train.epochs is missing"),
        (["~optimizer"], "a run needs both a workload and an optimizer"),
        (["nodes=2"], "did you mean cluster.nodes"),
        (["a[b"], "cannot read the override 'a[b'"),
        (["~nothing"], "no key 'nothing'"),
        (["optimzer=birder"], "did you mean optimizer?"),
        (["evaluate=false"], "evaluate is not in this configuration yet: +evaluate=VALUE adds it"),
        (["profile=step"], "+profile=VALUE adds it"),
        (["~tune"], "tune has no value that could be removed"),
        (
            ["seed=1,2"],
            "seed=1,2 has several values: quote a text with a comma, write a list as [a,b]; run.py -m runs each",
        ),
        (["+exp=digits,ptb"], "+exp=digits,ptb has several values: run.py -m runs each"),
        (["+exp=[digits,ptb]"], "exp is one name, not a list"),
        (["optimizer=[sgdm,birder]"], "optimizer is one name, not a list"),
    ],
)
def test_unknown_names(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        compose.compose(overrides)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run_name=2024"], "run_name names a folder: letters, digits"),
        (["results_dir=1e3"], "results_dir must be the path of a folder, not 1000.0"),
        (["output_dir=''"], "output_dir must be the path of a folder, not ''"),
        (["+exp=digits", "exp=0"], "a group is chosen by the name of a file"),
        (["wandb=null"], "a group is chosen by the name of a file"),
        (["train=5"], "train is a section: set its keys, such as train.batch_per_rank=VALUE, not 5"),
        (["+profile=5"], "a group is chosen by the name of a file"),
        (["seed=9223372036854775808"], "seed must be at most 4294967295"),
        (["comm.bucket_cap_mb=1e300"], "comm.bucket_cap_mb must be at most 100000, not 1e+300"),
        (["cluster.nodes=99999999999999999999999"], "cluster.nodes must be at most 10000"),
        (["optimizer._target_=birder.Nosuch"], "no class optimizer._target_='birder.Nosuch'"),
        (["comm.topology=hsdp", "optimizer=muon"], "comm.topology=hsdp: Muon works on whole parameters"),
        (["optimizer._target_=torch.nn.Linear"], "optimizer._target_='torch.nn.Linear' is not a BucketOptimizer"),
        (["workload._target_=os.system"], "workload._target_='os.system' is not a Workload"),
        (["cluster._target_=subprocess.Popen"], "cluster._target_='subprocess.Popen' is not a Launcher"),
        (["optimizer._target_=5"], "optimizer._target_ must be the full name of a class, not 5"),
        (["data.path=/no/such/place"], "data.path='/no/such/place': digits reads no files, so leave it out"),
        (["parity.baseline=onebit_adam"], "parity.baseline='onebit_adam' names no class of optimizer: OneBitAdam"),
        (["parity.baseline=sgd"], "names no class of optimizer; did you mean SGDM?"),
        (["workload.model=5"], "workload.model must be text, not 5"),
        (["workload.train_images=1.5"], "workload.train_images must be a whole number, or null, not 1.5"),
        (["+scales.quick.epoch=1"], "scales.paper has no 'epoch', which another scale has"),
        (["seed=${seed}"], "Recursive interpolation detected (at seed)"),
        (["cluster=slurm", "cluster.partition='a\nb'"], "cluster.partition must be text on one line"),
        (["cluster=emulated", "cluster.dilation=0.5"], "cluster.dilation must be auto, or a number of 1 or more"),
        (["cluster=emulated", "cluster.dilation=soon"], "cluster.dilation must be auto, or a number of 1 or more"),
        (["cluster=emulated", "cluster.link_gbps=0"], "cluster.link_gbps must be a number above 0, not 0"),
        (["cluster=emulated", "cluster.link_gbps=fast"], "cluster.link_gbps must be a number above 0, not 'fast'"),
        (["cluster=emulated", "cluster.max_total_gbps=-1"], "cluster.max_total_gbps must be a number above 0, or null"),
        (
            ["cluster=ssh", "cluster.hosts=a", "cluster.port=0"],
            "cluster.port must be a whole number, 1 or more, or null",
        ),
        (["cluster=ssh", "cluster.hosts=a", "cluster.port=65536"], "cluster.port must be at most 65535"),
        (["optimizer.lr=[" + "1," * 500 + "1]"], "..."),
    ],
)
def test_values_that_once_ended_in_a_traceback(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        compose.check(compose.compose(overrides))
    message = str(error.value)
    assert words in message
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize("value", ["null", "sgdm", "[sgdm,birder]", "[[1]]"])
def test_a_list_of_variants_that_is_none(value: str) -> None:
    with pytest.raises(
        UserError, match=r"^compare must be a list of lists of overrides, such as \[\['optimizer=sgdm'\]"
    ):
        compose.compared(compose.compose(["+exp=digits", f"compare={value}"]))


def test_files_of_the_users_own_are_found_beside_the_hyper_parameters(tmp_path: Path) -> None:
    """hydra.searchpath replaces the list of conf/config.yaml, and must not take conf/hparams from the search."""
    (tmp_path / "exp").mkdir()
    (tmp_path / "exp" / "mine.yaml").write_text("# @package _global_\nexp: mine\nseed: 7\n")
    kept = resolved("+exp=digits", "optimizer=onebit_adam")["optimizer"]
    made = resolved(f"hydra.searchpath=[{tmp_path}]", "+exp=mine", "workload=digits", "optimizer=onebit_adam")
    assert (made["exp"], made["seed"]) == ("mine", 7)
    assert made["optimizer"] == kept


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.chdir"])
def test_where_a_run_is_kept_is_said_by_its_own_keys(key: str) -> None:
    with pytest.raises(UserError, match=f"{key} is not used here: output_dir, run_name and results_dir say"):
        compose.compose([f"{key}=elsewhere"])


@pytest.mark.parametrize("key", ["hydra.job.env_set.NCCL_DEBUG", "hydra.job.env_copy"])
def test_variables_that_no_rank_would_see_are_refused(key: str) -> None:
    """Hydra sets them while it composes, and takes them back before a run begins."""
    with pytest.raises(UserError, match=f"{key} is not used here: set a variable in the shell"):
        compose.compose(["+exp=digits", f"+{key}=INFO"])


def test_missing_value_names_its_key() -> None:
    with pytest.raises(UserError, match=r"optimizer\.warmup_steps has no value: set it with optimizer\.warmup_steps="):
        resolved("workload=digits", "optimizer=onebit_adam", "optimizer.warmup_steps=???")


def test_workload_with_unknown_argument() -> None:
    with pytest.raises(UserError, match=r"no key 'workload\.colour' in the configuration; did you mean workload\."):
        compose.check(compose.compose(["+exp=digits", "+workload.colour=blue"]))


@pytest.mark.parametrize("name", ["a b", "ü", "a(b)", "a=b", "[a]", "it;s & #1"])
@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_folders_with_any_name(name: str, quote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make DATA=FOLDER` passes them on; below the home folder too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name).mkdir()
    for typed in (f"{tmp_path}/{name}", f"~/{name}"):
        made = resolved("+exp=ptb", *(f"{key}={quote}{typed}{quote}" for key in ("data.path", "output_dir")))
        assert [made["data"]["path"], made["output_dir"]] == [f"{tmp_path}/{name}"] * 2


def test_a_path_is_passed_on_as_it_was_typed() -> None:
    """Two runs are the same when their commands are: no old command may change. A comma is a sweep, a call Hydra's."""
    typed = ["data.path=./a/../b/", "data.path='a b'", "output_dir=x,y", "data.path=glob(a)", "output_dir=${seed}/a"]
    assert compose.readable(typed) == typed


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file, not a folder"):
        compose.check(compose.compose(["+exp=digits", f"output_dir={tmp_path}/file/deeper"]))
    rules.check_writable("output_dir", tmp_path / "to" / "be" / "made")
    assert not (tmp_path / "to").exists()


def test_spec_round_trip(tmp_path: Path) -> None:
    composed = compose.compose(["+exp=digits", f"output_dir={tmp_path}"])
    spec = compose.make_spec(composed, group="g")
    assert not list(tmp_path.iterdir())
    assert RunSpec.load(spec.save()) == spec
    assert spec.id.split("-", 2)[2].startswith("digits-birder-")
    assert spec.run_dir == str(tmp_path / "digits" / spec.id)
    assert spec.overrides == ["+exp=digits", f"output_dir={tmp_path}"]
    assert spec.command == f"python experiments/run.py +exp=digits output_dir={tmp_path}"
    assert "${" not in yaml.safe_dump(spec.config)
    assert compose.make_spec(composed).id != spec.id


def test_variants_of_a_comparison() -> None:
    base = compose.compose(["+exp=resnet50", "cluster.nodes=4", "run_name=mine"])
    every = compare.variants(base, None)
    by_nodes = [v for v in base.config.compare if compare.BY_NODES in v]
    assert len(every) == len(base.config.compare) - len(by_nodes)  # with one rank a node they are the flat form
    names = {compose.resolve(v)["run_name"] for v in every}
    assert len(names) == len(every)
    assert all(compose.resolve(v)["cluster"]["nodes"] == 4 for v in every)
    assert {v.choices["optimizer"] for v in compare.variants(base, ["birder"])} == {"birder"}
    with pytest.raises(UserError, match="compares no 'lion'; there are: birder, onebit_adam, sgdm"):
        compare.variants(base, ["lion"])
    with pytest.raises(UserError, match="--methods"):
        compare.variants(compose.compose(["+exp=resnet50", "optimizer=birder"]), None)
    with pytest.raises(UserError, match="nothing to compare"):
        compare.variants(compose.compose([]), None)
    with pytest.raises(UserError, match="--methods leaves nothing"):
        compare.variants(base, [])


@pytest.mark.parametrize(("ranks", "by_nodes"), [(1, False), (2, True)])
def test_under_torchrun_its_world_says_whether_nodes_are_compared(
    ranks: int, by_nodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for key, value in world.items():
        monkeypatch.setenv(key, value)
    base = compose.compose(["+exp=resnet50", "cluster=local"])
    listed = [v for v in base.config.compare if "optimizer=birder" in v]
    base.config.compare = listed
    chosen = compare.variants(base, ["birder"])
    assert any(compose.resolve(v)["comm"]["topology"] == "hierarchical" for v in chosen) is by_nodes
    assert {(v.config.cluster.nodes, v.config.cluster.ranks_per_node) for v in chosen} == {(2 // ranks, ranks)}


def test_a_run_is_named_after_its_variant(tmp_path: Path) -> None:
    def name(*overrides: str) -> str:
        composed = compose.compose(["+exp=digits", f"output_dir={tmp_path}", *overrides])
        return Path(compose.make_spec(composed).run_dir).name.split("-", 2)[2].rpartition("-")[0]

    assert name("optimizer=sgdm", "optimizer.wire=bf16") == "digits-sgdm-bf16"
    assert name("comm.topology=hierarchical") == "digits-birder-hierarchical"
    assert name("comm.enabled=false") == "digits-no-communication"
    assert name("++optimizer.reduce=one_phase") == "digits-birder-one-phase"


def test_nodes_as_workers_are_compared_where_nodes_have_several_ranks() -> None:
    def topologies(*overrides: str) -> list[str]:
        made = compare.variants(compose.compose(["+exp=resnet50", "scale=quick", *overrides]), ["birder"])
        return [compose.resolve(v)["comm"]["topology"] for v in made]

    assert topologies() == topologies("cluster.nodes=8") == ["flat"]
    assert topologies("cluster.ranks_per_node=2") == topologies("scale=paper") == ["flat", "hierarchical"]


def test_headline_says_what_it_is() -> None:
    made = compose.compose(["+exp=resnet50", "cluster.nodes=4", "scale=quick"])
    line = start.headline(made, compose.check(made))
    assert line.startswith("Emulated: 4 nodes")
    for words in ("synthetic", "quick scale", "not accuracy", "make resnet50 NODES=4 SCALE=paper DATA=/path/to/data"):
        assert words in line


def test_headline_keeps_the_data_that_were_given(tmp_path: Path) -> None:
    folder = tmp_path / "my text"
    folder.mkdir()
    for part in ("train", "valid"):
        (folder / f"{part}.txt").write_text("a b c\n" * 50)
    made = compose.compose(["+exp=ptb", f"data.path='{folder}'", "scale=quick"])
    line = start.headline(made, compose.check(made))
    assert line.endswith(f": make ptb SCALE=paper DATA='{folder}'")


def test_headline_of_a_run_that_no_file_describes() -> None:
    made = compose.compose(["workload=digits", "scale=quick"])
    line = start.headline(made, compose.check(made))
    assert line.startswith("Local: 1 node of 2 ranks as processes on this machine; ")
    assert "make" not in line


def test_headline_names_a_command_that_there_is() -> None:
    assert start.make_command("resnet50") == "make resnet50"
    assert start.make_command("cser_imagenet") == "make exp EXP=cser_imagenet"


def test_a_device_that_does_not_go_with_the_back_end() -> None:
    rules.check_device({"backend": "auto", "device": "cpu"})
    rules.check_device({"backend": "nccl"})  # of ssh, which has no such key
    with pytest.raises(UserError, match=r"cluster\.device=cpu takes none"):
        rules.check_device({"backend": "nccl", "device": "cpu"})


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ([], "paper"),
        (["cluster.device=cpu"], "quick"),
        (["cluster.backend=gloo"], "quick"),
        (["cluster.backend=gloo", "cluster.device=cuda"], "paper"),
    ],
)
def test_the_scale_is_the_papers_where_ranks_take_gpus(
    more: list[str], scale: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("launch.probe.visible_gpus", lambda: ["0"])
    composed = compose.compose(["+exp=resnet50", "cluster=local", f"data.path={tmp_path}", *more])
    assert composed.config.scale.name == scale


def test_a_launch_resolves_its_configuration_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks gets a copy of its own; a configuration that is changed is resolved anew."""
    resolved = 0
    check = compose.validate.check

    def counted(config: dict[str, Any], structure_only: bool = False) -> None:
        nonlocal resolved
        resolved += not structure_only
        check(config, structure_only=structure_only)

    monkeypatch.setattr(compose.validate, "check", counted)
    monkeypatch.setattr(LocalLauncher, "launch", lambda self, spec: None)
    made = compose.compose(["+exp=digits", f"output_dir={tmp_path}", f"results_dir={tmp_path}"])
    start.launch(made, alone=True)
    assert resolved == 1
    compose.resolve(made)["seed"] = 7
    assert compose.resolve(made)["seed"] == 0
    made.config.seed = 5
    assert compose.resolve(made)["seed"] == 5
    assert resolved == 2
