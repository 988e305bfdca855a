"""neuralforecast: NBEATS on the monthly air passengers that it ships."""

from neuralforecast import NeuralForecast
from neuralforecast.models import NBEATS
from neuralforecast.utils import AirPassengersDF
from recording import Recording

if __name__ == "__main__":
    recording = Recording(seed=1)
    model = NBEATS(
        input_size=24, h=12, max_steps=120 * recording.times, callbacks=[recording.callback("pytorch_lightning")]
    )
    forecast = NeuralForecast(models=[model], freq="ME")
    with recording:
        forecast.fit(df=AirPassengersDF)
