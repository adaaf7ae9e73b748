"""The checks of the exercises, one module per lesson: each names the mistake, and none says only "wrong"."""
