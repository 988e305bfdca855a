"""GluonTS: DeepAR, which reads windows of series from an iterable dataset."""

import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch import DeepAREstimator
from recording import Recording

if __name__ == "__main__":
    recording = Recording(seed=1)
    months = pd.period_range("2000-01", periods=180, freq="M")
    waves = np.sin(np.arange(180) * np.pi / 6)
    series = {f"s{i}": pd.Series(waves + np.random.normal(i, 0.2, 180), index=months) for i in range(20)}
    estimator = DeepAREstimator(
        prediction_length=12,
        freq="M",
        trainer_kwargs={"max_epochs": 2 * recording.times, "accelerator": "cpu", "callbacks": [recording.callback()]},
    )
    with recording:
        estimator.train(PandasDataset(series))
