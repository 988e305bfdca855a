import os
from pathlib import Path

import lmdb
import pytest

from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.format import key
from lightning_gpuopt.storage.shard_writer import ShardWriter


def foreign(path: Path, last: int) -> None:
    """A shard file whose second key somebody else has chosen."""
    with lmdb.open(str(path), subdir=False, lock=False, lib_version=0) as env, env.begin(write=True) as txn:
        txn.put(key(0), codec.encode(0).value(0, 0))
        txn.put(key(last), codec.encode(1).value(0, 1))


def test_keys_out_of_order_are_an_error_and_not_lost_samples(tmp_path: Path) -> None:
    foreign(tmp_path / "shard-00000.mdb", last=5)
    writer = ShardWriter(tmp_path, 0, resume=True)
    writer.add(codec.encode(2))
    with pytest.raises(StorageError, match=r"shard-00000\.mdb: LMDB took 0 of 1 samples in key order"):
        writer.commit()
    writer.close()


def test_a_gap_in_the_keys_is_found_when_the_shard_is_read_back(tmp_path: Path) -> None:
    foreign(tmp_path / "shard-00000.mdb", last=2)
    writer = ShardWriter(tmp_path, 0, resume=True)
    with pytest.raises(DamagedError, match=r"shard-00000\.mdb: sample 1"):
        writer.finish()
    writer.close()
    assert not (tmp_path / "shard-00000.json").exists()


def test_a_shard_begun_anew_is_not_finished(tmp_path: Path) -> None:
    """Whatever of an earlier shard of this number stayed could count as the new one's."""
    writer = ShardWriter(tmp_path, 0)
    writer.add(codec.encode(1))
    writer.finish()
    assert len(os.listdir(tmp_path)) == 3
    writer = ShardWriter(tmp_path, 0)
    assert os.listdir(tmp_path) == ["shard-00000.mdb"]
    writer.close()
    writer = ShardWriter(tmp_path, 0, resume=True)
    assert writer.committed == 0
    writer.close()


def test_the_summary_of_an_earlier_shard_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path, 0)
    writer.add(codec.encode(1))
    writer.finish()
    removed: list[str] = []
    monkeypatch.setattr(Path, "unlink", lambda self, missing_ok=False: removed.append(self.suffix))
    ShardWriter(tmp_path, 0).close()
    assert removed == [".json", ".tab", ".mdb"]
