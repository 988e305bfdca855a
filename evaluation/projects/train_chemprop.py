"""chemprop: message passing over molecules, one property."""

import random

from chemprop import data, models, nn
from lightning import pytorch as pl
from recording import Recording

PARTS = ("C", "CC", "C(C)", "C(=O)", "N", "O", "C(O)", "c1ccccc1", "C(Cl)", "S", "C1CC1", "C(=O)N")

if __name__ == "__main__":
    recording = Recording(seed=1)
    smiles = ["C" + "".join(random.choices(PARTS, k=random.randint(2, 10))) for _ in range(1000)]
    points = [data.MoleculeDatapoint.from_smi(each, [len(each) / 10]) for each in smiles]
    train, validation = data.MoleculeDataset(points[:800]), data.MoleculeDataset(points[800:])
    scaler = train.normalize_targets()
    validation.normalize_targets(scaler)
    output = nn.UnscaleTransform.from_standard_scaler(scaler)
    model = models.MPNN(
        nn.BondMessagePassing(),
        nn.MeanAggregation(),
        nn.RegressionFFN(output_transform=output),
        batch_norm=True,
        metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
    )
    trainer = pl.Trainer(
        logger=False, accelerator="cpu", max_epochs=10 * recording.times, callbacks=[recording.callback()]
    )
    with recording:
        trainer.fit(model, data.build_dataloader(train), data.build_dataloader(validation, shuffle=False))
