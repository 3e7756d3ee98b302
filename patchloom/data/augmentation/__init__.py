"""What happens to training pictures, one by one in workers or a whole batch on the device."""
