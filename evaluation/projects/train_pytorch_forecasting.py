"""pytorch-forecasting: a Temporal Fusion Transformer, from a loader with two workers."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data.examples import generate_ar_data
from recording import Recording

if __name__ == "__main__":
    recording = Recording(seed=1)
    data = generate_ar_data(seasonality=10.0, timesteps=400, n_series=20, seed=1).astype({"series": str})
    training = TimeSeriesDataSet(
        data[data.time_idx < 380],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        max_encoder_length=36,
        max_prediction_length=6,
        static_categoricals=["series"],
        time_varying_known_reals=["time_idx"],
        time_varying_unknown_reals=["value"],
    )
    validation = TimeSeriesDataSet.from_dataset(training, data, min_prediction_idx=380, stop_randomization=True)
    model = TemporalFusionTransformer.from_dataset(
        training,
        hidden_size=32,
        attention_head_size=1,
        dropout=0.1,
        hidden_continuous_size=16,
        loss=QuantileLoss(),
        learning_rate=0.03,
        reduce_on_plateau_patience=4,
    )
    trainer = pl.Trainer(
        max_epochs=4 * recording.times,
        accelerator="cpu",
        gradient_clip_val=0.1,
        limit_train_batches=30,
        callbacks=[EarlyStopping(monitor="val_loss", patience=10), recording.callback()],
    )
    with recording:
        trainer.fit(
            model,
            train_dataloaders=training.to_dataloader(train=True, batch_size=128, num_workers=2),
            val_dataloaders=validation.to_dataloader(train=False, batch_size=128, num_workers=2),
        )
