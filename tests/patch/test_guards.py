"""Programs whose text does not say for sure what an edit changes: refused."""

from __future__ import annotations

import pytest

from lightning_gpuopt.patch.sources import Refusal
from tests.patch.test_places import CALL, HEAD, code_of, edited_by

OPTION = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', type=int, default=0)\n"
OPTIONS = OPTION + "args = p.parse_args()\n"
KW = "KW = {'num_workers': 0}\nDataLoader(x, batch_size=4, num_workers=KW['num_workers'])\n"
MODULE = "class DM:\n    {}\n    def train_dataloader(self):\n        return DataLoader(x, num_workers=self.n)\n"


@pytest.mark.parametrize(
    ("body", "stack", "said"),
    [
        ("N = 0\nexec(open('other.py').read())\nDataLoader(x, num_workers=N)\n", (CALL,), "`exec` at train.py:3"),
        (
            "N = 0\nvars(config)[key] = 0\nDataLoader(x, num_workers=N)\n",
            (CALL,),
            "a computed name is set at train.py:3",
        ),
        (
            "class A:\n    n = 0\na = A()\na.__dict__[k] = 1\nDataLoader(x, num_workers=a.n)\n",
            (CALL,),
            "may be changed at",
        ),
        (OPTIONS + "p.default = 0\nDataLoader(x, num_workers=args.n)\n", (CALL,), "default of an option is set"),
        (
            "import sys\nsys.argv = []\n" + OPTIONS + "DataLoader(x, num_workers=args.n)\n",
            (CALL,),
            "is changed at train.py:3",
        ),
        (
            "import sys\nsys.argv.append('-n')\n" + OPTIONS + "DataLoader(x, num_workers=args.n)\n",
            (CALL,),
            "is changed",
        ),
        (
            OPTION.replace("Parser()", "Parser(default_config_files=[])")
            + "args = p.parse_args()\nDataLoader(x, num_workers=args.n)\n",
            (CALL,),
            "in another way, by `default_config_files`",
        ),
        (OPTIONS.replace("type=int", "type=even") + "DataLoader(x, num_workers=args.n)\n", (CALL,), "type of its own"),
        # a function or class that is used again
        (
            "def make(d):\n    return DataLoader(d, num_workers=0)\nmake(x)\nif y:\n    make(y)\n",
            (CALL, "make(x"),
            "called at",
        ),
        ("def kw():\n    return {'num_workers': 0}\na = kw()\nb = kw()\nDataLoader(x, **a)\n", (CALL,), "called at"),
        (MODULE.format("a = n = 0"), (CALL,), "not written there, once"),
        (MODULE.format("def __init__(self):\n        self.m = self.n = 0"), (CALL,), "one plain assignment"),
        ("@dataclass\n" + MODULE.format("n: int = 0") + "DM(n=0)\n", (CALL,), "which may give `n`"),
        (MODULE.format("n = 0") + "class Other(DM):\n    def n(self): pass\n", (CALL,), "is set in `Other`, too"),
        (MODULE.replace("DM:", "DM(Fast, Base):").format("n = 0"), (CALL,), "has several bases"),
        (
            MODULE.replace("DM:", "DM(pl.LightningDataModule):").format("def __init__(self, n):\n        self.n = n")
            + "DM(0)\nREGISTRY['DM']\n",
            (CALL,),
            "named by a text",
        ),
        (
            "class DM:\n    def __init__(self, n):\n        n = 0\n        self.save_hyperparameters()\n"
            "    def train_dataloader(self):\n        return DataLoader(x, num_workers=self.hparams.n)\nDM(0)\n",
            (CALL,),
            "is set again in `DM.__init__`",
        ),
        (
            "class DM:\n    def __init__(self, n):\n        self.save_hyperparameters()\n        self.hparams.n = 0\n"
            "    def train_dataloader(self):\n        return DataLoader(x, num_workers=self.hparams.n)\nDM(0)\n",
            (CALL,),
            "`n` may be set at train.py:5",
        ),
        # who else has what a container holds
        (KW + "other = {**KW, 'batch_size': 8}\n", (CALL,), "read in other places, too: train.py:4"),
        (KW + "other = KW | {'batch_size': 8}\n", (CALL,), "train.py:4"),
        (KW + "other = KW\n", (CALL,), "train.py:4"),
        (KW + "def both(kw=KW): pass\n", (CALL,), "train.py:4"),
        (KW + "class V:\n    def val(self, kw):\n        DataLoader(y, **kw)\nV().val(KW)\n", (CALL,), "train.py:7"),
        (KW + "deepcopy(KW)\n", (CALL,), "train.py:4"),
        (KW + "partial(val, opts=KW)\n", (CALL,), "train.py:4"),
        (KW + "def tune(d):\n    d |= {'num_workers': 0}\ntune(KW)\n", (CALL,), "train.py:6"),
        # an argument that goes elsewhere
        (
            "class M:\n    def f(self, n):\n        DataLoader(x, num_workers=n)\nm = M()\ntype(m).f(m, 0)\n",
            (CALL, "type(m).f("),
            "gives the object itself",
        ),
        ("def make(d, num_workers=0, **kw):\n    return DataLoader(d, **kw)\nmake(x)\n", (CALL, "make("), "of its own"),
        (
            "def make(d, n=0):\n    return DataLoader(d, num_workers=n)\nmake = partial(make, x)\nmake(n=0)\n",
            (CALL, "make(n"),
            "more than one place|called",
        ),
    ],
)
def test_what_the_text_does_not_say_for_sure_is_refused(tmp_path, body, stack, said):
    with pytest.raises(Refusal, match=said):
        edited_by(code_of(tmp_path, {"train.py": HEAD + body}, stack))


@pytest.mark.parametrize("arguments", [("-vj0",), ("--n=0",), ("@file",)])
def test_an_option_that_the_command_line_has_is_refused(tmp_path, arguments):
    body = OPTIONS.replace("'--n'", "'-j', '--n'") + "DataLoader(x, num_workers=args.n)\n"
    with pytest.raises(Refusal, match="overridden on the command line"):
        edited_by(code_of(tmp_path, {"train.py": HEAD + body}, arguments=arguments))


def test_a_constant_that_comes_to_another_file_under_a_third_name_is_refused(tmp_path):
    files = {
        "settings.py": "N = 0\n",
        "more.py": "from settings import N as WORKERS\n",
        "valid.py": "from more import WORKERS\nprint(WORKERS)\n",
        "train.py": HEAD + "from settings import N\nDataLoader(x, num_workers=N)\n",
    }
    with pytest.raises(Refusal, match=r"read in other places, too: valid.py:2"):
        edited_by(code_of(tmp_path, files))


def test_a_plain_default_of_an_option_is_edited(tmp_path):
    text = HEAD + OPTIONS + "DataLoader(x, num_workers=args.n)\n"
    assert edited_by(code_of(tmp_path, {"train.py": text})) == text.replace("default=0", "default=4")
