"""GPU kernels, compilation and CUDA graphs: without this package results change by rounding only."""
