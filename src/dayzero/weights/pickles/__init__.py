"""PyTorch pickle files read as containers of ranges: nothing of them is run."""
