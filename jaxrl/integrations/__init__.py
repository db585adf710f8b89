"""Other programs: their names and files, which runs read, and what policies become for them."""
