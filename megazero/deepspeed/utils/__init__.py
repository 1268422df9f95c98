"""What programs import of `deepspeed.utils`."""
