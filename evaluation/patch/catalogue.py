"""The scripts: each is watched with ``num_workers`` kept at 2, then patched, and if there is a patch, run again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

COMMON: Final = """\
import json, os, time, torch
import lightning.pytorch as pl
from torch.utils.data import Dataset


class Data(Dataset):
    def __len__(self):
        return int(os.environ.get("SAMPLES", 16))

    def __getitem__(self, index):
        time.sleep(float(os.environ.get("SAMPLE_S", 0)))
        return torch.full((4,), float(index))


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen, self.losses = [], []

    def training_step(self, batch, batch_idx):
        loss = self.layer(torch.nn.functional.dropout(batch, 0.5)).pow(2).mean()
        self.seen.append(batch[:, 0].tolist())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def on_fit_end(self):
        loader = self.trainer.train_dataloader
        found = {"seen": self.seen, "losses": self.losses, "num_workers": vars(loader)["num_" + "workers"]}
        with open(os.environ["OUT"], "w") as file:
            json.dump(found, file)


QUIET = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=2,
             enable_model_summary=False, num_sanity_val_steps=0)


def fit(loader, **more):
    pl.seed_everything(0)
    pl.Trainer(**{**QUIET, **more}).fit(Model(), loader)
"""

HEAD: Final = "from torch.utils.data import DataLoader\nfrom common import *\n"
MODULE: Final = """\
class DM(pl.LightningDataModule):
    def __init__(self, num_workers=0):
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self):
        return DataLoader(Data(), batch_size=4, shuffle=True, num_workers=self.num_workers)
"""
CLI: Final = """
from lightning.pytorch.cli import LightningCLI

pl.seed_everything(0)
LightningCLI(Model, pl.LightningDataModule, subclass_mode_data=True, trainer_defaults=QUIET, save_config_callback=None,
             seed_everything_default=0)
"""
ARGUMENTS: Final = (
    "import argparse\nparser = argparse.ArgumentParser()\n"
    'parser.add_argument("--workers", type=int, default=0)\nargs = parser.parse_args()\n'
)


@dataclass(frozen=True)
class Script:
    """A script, and what a patch of it has to be.

    Attributes:
        source: of ``train.py``, behind the imports; bytes are the whole file.
        added: the lines that the patch adds, without their indentation; None: a refusal is expected.
        refusal: what the refusal says, in part.
        files: others beside it.
        arguments: of the command line.
        environment: variables that are set.
        is_trap: whether an edit by guessing would be wrong, or could be.
    """

    source: str | bytes
    added: tuple[str, ...] | None = None
    refusal: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    is_trap: bool = False


def _trap(source: str | bytes, refusal: str = "", added: tuple[str, ...] | None = None, **more: object) -> Script:
    return Script(source, added, refusal, is_trap=True, **more)  # type: ignore[arg-type]


_CALL: Final = "fit(DataLoader(Data(), batch_size=4, shuffle=True{}))\n"
_WITH: Final = _CALL.format(", num_workers=2").rstrip()

SCRIPTS: Final[dict[str, Script]] = {
    # ---- written at the call ----
    "absent": Script(_CALL.format(""), (_WITH,)),
    "keyword": Script(_CALL.format(", num_workers=0"), (_WITH,)),
    "positional": Script("fit(DataLoader(Data(), 4, True, None, None, 0))\n", ("fit(DataLoader(Data(), 4, True, None, None, 2))",)),
    "lines": Script(
        "loader = DataLoader(\n    Data(),\n    batch_size=4,  # small\n    num_workers=0,  # none yet\n)\nfit(loader)\n",
        ("num_workers=2,  # none yet",),
    ),
    "lines_absent": Script(
        "loader = DataLoader(\n    Data(),\n    batch_size=4,  # small\n)\nfit(loader)\n", ("num_workers=2,",)
    ),
    "one_argument_a_line": Script("loader = DataLoader(\n    Data(),\n)\nfit(loader)\n", ("num_workers=2,",)),
    "aligned": Script(
        "loader = DataLoader(Data(),\n                    batch_size=4)\nfit(loader)\n", ("batch_size=4,", "num_workers=2)")
    ),
    "dotted": Script(
        "import torch\nfit(torch.utils.data.DataLoader(Data(), batch_size=4))\n",
        ("fit(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2))",),
    ),
    "renamed": Script(
        "from torch.utils.data import DataLoader as DL\nfit(DL(Data(), num_workers=0))\n", ("fit(DL(Data(), num_workers=2))",)
    ),
    "subclass": Script(
        "class Mine(DataLoader):\n    pass\n\nfit(Mine(Data(), batch_size=4))\n",
        ("fit(Mine(Data(), batch_size=4, num_workers=2))",),
    ),
    "subclass_constructor": Script(
        "class Mine(DataLoader):\n    def __init__(self, data):\n        super().__init__(data, batch_size=4)\n\n"
        "fit(Mine(Data()))\n",
        ("super().__init__(data, batch_size=4, num_workers=2)",),
    ),
    "in_a_function": Script(
        "def main():\n    fit(DataLoader(Data(), num_workers=0))\n\nif __name__ == '__main__':\n    main()\n",
        ("fit(DataLoader(Data(), num_workers=2))",),
    ),
    "hook_of_module": Script(
        "class M(Model):\n    def train_dataloader(self):\n        return DataLoader(Data(), batch_size=4)\n\n"
        "pl.seed_everything(0)\npl.Trainer(**QUIET).fit(M())\n",
        ("return DataLoader(Data(), batch_size=4, num_workers=2)",),
    ),
    "other_file": Script(
        "from data import make\nfit(make())\n", ("return DataLoader(Data(), batch_size=4, num_workers=2)",),
        files={"data.py": HEAD + "def make():\n    return DataLoader(Data(), batch_size=4)\n"},
    ),
    "beside_validation": Script(
        "train = DataLoader(Data(), batch_size=4)\nval = DataLoader(Data(), batch_size=8)\n"
        "pl.seed_everything(0)\npl.Trainer(**QUIET).fit(Model(), train, val)\n",
        ("train = DataLoader(Data(), batch_size=4, num_workers=2)",),
    ),
    # ---- written elsewhere ----
    "variable": Script("def main():\n    workers = 0\n    fit(DataLoader(Data(), num_workers=workers))\n\nmain()\n", ("workers = 2",)),
    "constant": Script("WORKERS = 0\nfit(DataLoader(Data(), num_workers=WORKERS))\n", ("WORKERS = 2",)),
    "constant_with_comment": Script(
        "WORKERS: int = 0  # processes\nfit(DataLoader(Data(), num_workers=WORKERS))\n", ("WORKERS: int = 2  # processes",)
    ),
    "imported_constant": Script(
        "from settings import WORKERS\nfit(DataLoader(Data(), num_workers=WORKERS))\n", ("WORKERS = 2",),
        files={"settings.py": "WORKERS = 0\n"},
    ),
    "constant_of_module": Script(
        "import settings\nfit(DataLoader(Data(), num_workers=settings.WORKERS))\n", ("WORKERS = 2",),
        files={"settings.py": "WORKERS = 0\n"},
    ),
    "keyword_of_caller": Script(
        "def make(data, workers):\n    return DataLoader(data, num_workers=workers)\n\nfit(make(Data(), workers=0))\n",
        ("fit(make(Data(), workers=2))",),
    ),
    "argument_of_caller": Script(
        "def make(data, workers):\n    return DataLoader(data, num_workers=workers)\n\nfit(make(Data(), 0))\n", ("fit(make(Data(), 2))",)
    ),
    "default_of_parameter": Script(
        "def make(data, workers=0):\n    return DataLoader(data, num_workers=workers)\n\nfit(make(Data()))\n",
        ("fit(make(Data(), workers=2))",),
    ),
    "keywords_of_caller": Script(
        "def make(data, **more):\n    return DataLoader(data, **more)\n\nfit(make(Data(), batch_size=4))\n",
        ("fit(make(Data(), batch_size=4, num_workers=2))",),
    ),
    "two_callers": Script(
        "def outer(workers):\n    return inner(workers)\n\ndef inner(number):\n"
        "    return DataLoader(Data(), num_workers=number)\n\nfit(outer(0))\n",
        ("fit(outer(2))",),
    ),
    "dict": Script(
        'CONFIG = {"batch_size": 4, "num_workers": 0}\nfit(DataLoader(Data(), **CONFIG))\n',
        ('CONFIG = {"batch_size": 4, "num_workers": 2}',),
    ),
    "dict_without_it": Script(
        'CONFIG = {"batch_size": 4}\nfit(DataLoader(Data(), **CONFIG))\n', ("fit(DataLoader(Data(), **CONFIG, num_workers=2))",)
    ),
    "key": Script('CONFIG = {"data": {"workers": 0}}\nfit(DataLoader(Data(), num_workers=CONFIG["data"]["workers"]))\n',
                  ('CONFIG = {"data": {"workers": 2}}',)),
    "argparse": Script(
        ARGUMENTS + "fit(DataLoader(Data(), num_workers=args.workers))\n",
        ('parser.add_argument("--workers", type=int, default=2)',),
    ),
    "argparse_in_function": Script(
        "import argparse\ndef parse():\n    parser = argparse.ArgumentParser()\n"
        '    parser.add_argument("-w", "--num-workers", default=0, type=int)\n    return parser.parse_args()\n\n'
        "def main(args):\n    fit(DataLoader(Data(), num_workers=args.num_workers))\n\nmain(parse())\n",
        ('parser.add_argument("-w", "--num-workers", default=2, type=int)',),
    ),
    "argparse_object": Script(
        "import argparse\nclass App:\n    def __init__(self, args):\n        self.args = args\n\n    def run(self):\n"
        "        fit(DataLoader(Data(), num_workers=self.args.workers))\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--workers', type=int, default=0)\nApp(parser.parse_args()).run()\n",
        ("parser.add_argument('--workers', type=int, default=2)",),
    ),
    "click": Script(
        'import click\n@click.command()\n@click.option("--workers", default=0)\ndef main(workers):\n'
        "    fit(DataLoader(Data(), num_workers=workers))\n\nmain(standalone_mode=False)\n",
        ('@click.option("--workers", default=2)',),
    ),
    "dataclass": Script(
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    workers: int = 0\n\ncfg = Config()\n"
        "fit(DataLoader(Data(), num_workers=cfg.workers))\n",
        ("workers: int = 2",),
    ),
    "dataclass_argument": Script(
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    workers: int = 1\n\ncfg = Config(workers=0)\n"
        "fit(DataLoader(Data(), num_workers=cfg.workers))\n",
        ("cfg = Config(workers=2)",),
    ),
    "class_attribute": Script(
        "class Config:\n    WORKERS = 0\n\nfit(DataLoader(Data(), num_workers=Config.WORKERS))\n", ("WORKERS = 2",)
    ),
    "datamodule": Script(MODULE + "\nfit(DM(num_workers=0))\n", ("fit(DM(num_workers=2))",)),
    "datamodule_default": Script(MODULE + "\nfit(DM())\n", ("fit(DM(num_workers=2))",)),
    "hparams": Script(
        MODULE.replace("self.num_workers = num_workers", "self.save_hyperparameters()").replace("=self.num", "=self.hparams.num")
        + "\nfit(DM(num_workers=0))\n",
        ("fit(DM(num_workers=2))",),
    ),
    "datamodule_of_arguments": Script(
        ARGUMENTS + MODULE + "\nfit(DM(num_workers=args.workers))\n", ('parser.add_argument("--workers", type=int, default=2)',)
    ),
    "environment_default": Script(
        'import os\nfit(DataLoader(Data(), num_workers=int(os.environ.get("GPUOPT_N", "0"))))\n',
        ('fit(DataLoader(Data(), num_workers=int(os.environ.get("GPUOPT_N", \'2\'))))',),
    ),
    "yaml": Script(
        'import yaml\nwith open("config.yaml") as file:\n    cfg = yaml.safe_load(file)\n'
        'fit(DataLoader(Data(), num_workers=cfg["data"]["workers"]))\n',
        ("workers: 2  # processes",),
        files={"config.yaml": "data:\n  workers: 0  # processes\n  size: 4\n"},
    ),
    "lightning_cli_configuration": Script(
        "import module\n" + CLI, ("num_workers: 2",), arguments=("fit", "--config", "run.yaml"),
        files={"run.yaml": "data:\n  class_path: __main__.DM\n  init_args:\n    num_workers: 0\n".replace("__main__", "module"),
               "module.py": HEAD + MODULE},
    ),
    "lightning_cli": _trap(MODULE + CLI, "add --data.num_workers 2", arguments=("fit", "--data=DM")),
    "lightning_cli_given": _trap(MODULE + CLI, "give --data.num_workers 2", arguments=("fit", "--data=DM", "--data.num_workers=0")),
    # ---- traps: what stands there is right, and hard to edit ----
    "crlf": _trap((HEAD + "fit(DataLoader(\n    Data(),\n    batch_size=4,\n))\n").replace("\n", "\r\n").encode(), added=("num_workers=2,",)),
    "tabs": _trap("def main():\n\tfit(DataLoader(\n\t\tData(),\n\t\tbatch_size=4,\n\t))\n\nmain()\n", added=("num_workers=2,",)),
    "non_ascii": _trap('gr\u00f6\u00dfe = "\u00e4\u00f6\U0001f600"; fit(DataLoader(Data(), num_workers=0))  # \u00fc\n',
                       added=('gr\u00f6\u00dfe = "\u00e4\u00f6\U0001f600"; fit(DataLoader(Data(), num_workers=2))  # \u00fc',)),
    "latin_1": _trap(
        ("# -*- coding: latin-1 -*-\n" + HEAD + 's = "\u00fc"; fit(DataLoader(Data(), num_workers=0))\n').encode("latin-1"),
        added=('s = "\ufffd"; fit(DataLoader(Data(), num_workers=2))',),
    ),
    "no_newline_at_end": _trap("fit(DataLoader(Data(), num_workers=0))", added=("fit(DataLoader(Data(), num_workers=2))",)),
    "continued_line": _trap("loader = DataLoader(Data(), \\\n    batch_size=4)\nfit(loader)\n", added=("batch_size=4, num_workers=2)",)),
    "two_alike": _trap("train, val = DataLoader(Data()), DataLoader(Data())\npl.seed_everything(0)\n"
                       "pl.Trainer(**QUIET).fit(Model(), train, val)\n",
                       added=("train, val = DataLoader(Data(), num_workers=2), DataLoader(Data())",)),
    # ---- traps: an edit would be wrong ----
    "one_call_for_two_of_one_dataset": _trap(
        "data = Data()\ntrain, val = [DataLoader(data) for _ in range(2)]\npl.seed_everything(0)\n"
        "pl.Trainer(**QUIET).fit(Model(), train, val)\n", "has made other loaders",
    ),
    "one_call_for_two": _trap("train, val = [DataLoader(data) for data in (Data(), Data())]\npl.seed_everything(0)\n"
                              "pl.Trainer(**QUIET).fit(Model(), train, val)\n", "has made other loaders"),
    "shared_constant": _trap("N = 0\ntrain = DataLoader(Data(), num_workers=N)\nval = DataLoader(Data(), num_workers=N)\n"
                             "pl.seed_everything(0)\npl.Trainer(**QUIET).fit(Model(), train, val)\n", "train.py:5"),
    "shared_attribute": _trap(
        MODULE + "\n    def val_dataloader(self):\n        return DataLoader(Data(), num_workers=self.num_workers)\n\nfit(DM())\n",
        "train.py:12",
    ),
    "shared_unpacked": _trap(
        MODULE.replace("self.num_workers = num_workers", 'self.given = {"batch_size": 4, "num_workers": num_workers}')
        .replace("batch_size=4, shuffle=True, num_workers=self.num_workers", "**self.given")
        + "\n    def val_dataloader(self):\n        return DataLoader(Data(), **self.given)\n\nfit(DM())\n", "in other places",
    ),
    "key_set_on_the_way": _trap(
        'def given():\n    found = {"batch_size": 4}\n    found["num_workers"] = 0\n    return found\n\n'
        "fit(DataLoader(Data(), **given()))\n", "in other places",
    ),
    "imported_under_another_name": _trap(
        "from settings import N\nimport other\nfit(DataLoader(Data(), num_workers=N))\n", "other.py:2",
        files={"settings.py": "N = 0\n", "other.py": "from settings import N as SEED\nprint(SEED)\n"},
    ),
    "explicit_self": _trap(
        "class Loader(DataLoader):\n    def __init__(self, data):\n        DataLoader.__init__(self, data, 4, False, None, None, 0)\n\n"
        "fit(Loader(Data()))\n", "the object itself",
    ),
    "made_by_its_class": _trap(
        MODULE + "\n    @classmethod\n    def default(cls):\n        return cls(0)\n\nmodule = DM.default()\nother = DM(0)\nfit(module)\n",
        "in a way that is not followed",
    ),
    "one_function_for_two_of_one_dataset": _trap(
        "def make(data):\n    return DataLoader(data)\n\ndata = Data()\ntrain = make(data)\nval = make(data)\n"
        "pl.seed_everything(0)\npl.Trainer(**QUIET).fit(Model(), train, val)\n", "has made other loaders",
    ),
    "computed": _trap("import os\nfit(DataLoader(Data(), num_workers=min(0, os.cpu_count())))\n", "computed"),
    "conditional": _trap("debug = True\nfit(DataLoader(Data(), num_workers=0 if debug else 8))\n", "computed"),
    "assigned_twice": _trap("N = 8\nN = 0\nfit(DataLoader(Data(), num_workers=N))\n", "more than one place"),
    "overridden": _trap(ARGUMENTS.replace("0)", "8)") + "fit(DataLoader(Data(), num_workers=args.workers))\n", "give --workers 2",
                        arguments=("--workers", "0")),
    "overridden_with_the_same": _trap(ARGUMENTS + "fit(DataLoader(Data(), num_workers=args.workers))\n", "give --workers 2",
                                      arguments=("--work=0",)),
    "set_defaults": _trap(ARGUMENTS.replace("args =", "parser.set_defaults(workers=0)\nargs =")
                          + "fit(DataLoader(Data(), num_workers=args.workers))\n", "may get its default"),
    "argument_set_later": _trap(ARGUMENTS + "setattr(args, 'workers', 0)\nfit(DataLoader(Data(), num_workers=args.workers))\n",
                                "may be set"),
    "environment": _trap('import os\nfit(DataLoader(Data(), num_workers=int(os.environ["GPUOPT_N"])))\n', "set GPUOPT_N=2",
                         environment={"GPUOPT_N": "0"}),
    "generated": _trap('exec("fit(DataLoader(Data(), num_workers=0))")\n', "generated code"),
    "decorated": _trap("import functools\ndef twice(f):\n    @functools.wraps(f)\n    def inner(*a, **k):\n        return f(*a, **k)\n"
                       "    return inner\n\n@twice\ndef make(workers=0):\n    return DataLoader(Data(), num_workers=workers)\n\n"
                       "fit(make(workers=0))\n", "decorator"),
    "partial": _trap("import functools\nmake = functools.partial(DataLoader, num_workers=0)\nfit(make(Data()))\n", "by its name"),
    "library": _trap("import sys; sys.path.insert(0, 'env/lib/site-packages')\nfrom made import make\nfit(make(Data()))\n", "library",
                     files={"env/lib/site-packages/made.py": HEAD.replace("from common import *\n", "")
                            + "def make(data):\n    return DataLoader(data, num_workers=0)\n"}),
    "changed_dict": _trap('CONFIG = {"num_workers": 8}\nCONFIG.update(dict(num_workers=0))\nfit(DataLoader(Data(), **CONFIG))\n', "train.py"),
    "made_after_fit": _trap("def make(data):\n    return DataLoader(data, num_workers=0)\n\nfit(make(Data()))\ntest = make(Data())\n",
                            "other loaders as well"),
    "made_after_fit_by_a_table": _trap("def make(data):\n    return DataLoader(data, num_workers=0)\n\nMAKE = {'loader': make}\n"
                                       "fit(MAKE['loader'](Data()))\ntest = MAKE['loader'](Data())\n", "other loaders as well"),
    "override_file": _trap("workers = 0\nexec(open('override.py').read())\nfit(DataLoader(Data(), num_workers=workers))\n", "`exec`",
                           files={"override.py": "workers = 0\n"}),
    "given_to_a_dataclass": _trap("from dataclasses import dataclass\n@dataclass\nclass Config:\n    workers: int = 0\n"
                                  "    def loader(self):\n        return DataLoader(Data(), num_workers=self.workers)\n\n"
                                  "fit(Config(workers=0).loader())\n", "may give"),
    "spread_for_another": _trap("KW = {'num_workers': 0}\nother = {**KW, 'batch_size': 2}\n"
                                "fit(DataLoader(Data(), num_workers=KW['num_workers']))\n", "other places"),
    "starred": _trap("given = [Data(), 4, True, None, None, 0]\nfit(DataLoader(*given))\n", "come out of a *"),
    "anchored_yaml": _trap(
        'import yaml\ncfg = yaml.safe_load(open("config.yaml"))\nfit(DataLoader(Data(), num_workers=cfg["workers"]))\n', "anchors",
        files={"config.yaml": "n: &n 0\nworkers: *n\n"},
    ),
}  # fmt: skip
