"""darts: one N-BEATS model of two series."""

from darts.models import NBEATSModel
from darts.utils.timeseries_generation import gaussian_timeseries, linear_timeseries, sine_timeseries
from recording import Recording

if __name__ == "__main__":
    recording = Recording(seed=1)
    first = sine_timeseries(length=200, value_frequency=1 / 12) + linear_timeseries(length=200)
    second = sine_timeseries(length=300, value_frequency=1 / 7) + gaussian_timeseries(length=300, std=0.1)
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=12,
        n_epochs=7 * recording.times,
        random_state=0,
        pl_trainer_kwargs={"accelerator": "cpu", "callbacks": [recording.callback("pytorch_lightning")]},
    )
    with recording:
        model.fit([first.astype("float32"), second.astype("float32")])
