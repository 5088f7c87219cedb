"""Ablation studies: what a study varies, statistics over seeds, and tables beside the paper's own figures."""
