"""What the image tasks share: plan, network, initial weights, batches, report."""
