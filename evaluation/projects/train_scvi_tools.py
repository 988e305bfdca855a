"""scvi-tools: scVI on synthetic counts with two batches of cells."""

import scvi
from recording import Recording

if __name__ == "__main__":
    recording = Recording(seed=1)
    scvi.settings.seed = 1  # what divides the cells is not seeded otherwise
    cells = scvi.data.synthetic_iid(batch_size=2000, n_genes=500)
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells)
    with recording:
        model.train(max_epochs=20 * recording.times, accelerator="cpu", callbacks=[recording.callback()])
