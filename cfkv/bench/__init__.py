"""`cfkv bench NAME`: ratios, measured side by side in one run on the machine at hand."""
