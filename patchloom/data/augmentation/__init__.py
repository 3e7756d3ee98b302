"""Augmentation of training images, one by one in workers or in whole batches on the device."""
