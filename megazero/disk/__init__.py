"""Model state on disks: swap files, reads and writes through aligned buffers, and the record of a whole step."""
