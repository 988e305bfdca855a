"""deeptab: an FT-Transformer classifier on a table of numbers and categories."""

import numpy as np
import pandas as pd
from deeptab.models import FTTransformerClassifier
from recording import Recording

if __name__ == "__main__":
    recording = Recording(seed=1)
    table = pd.DataFrame(np.random.normal(size=(4000, 5)), columns=list("abcde"))
    table["kind"] = np.random.choice(["x", "y", "z"], size=4000)
    label = (table["a"] + table["b"] * table["c"] + (table["kind"] == "x") > 0.2).astype(int).to_numpy()
    model = FTTransformerClassifier()
    with recording:
        model.fit(table, label, max_epochs=4 * recording.times, accelerator="cpu", callbacks=[recording.callback()])
