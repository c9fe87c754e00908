"""One machine without a scheduler: copy it, and name your system, scheduler, launcher and modules."""

site_configuration = {
    "systems": [
        {
            "name": "workstation",
            "hostnames": [".*"],
            "partitions": [
                {"name": "cpu", "scheduler": "local", "launcher": "mpirun", "environs": ["gyre"], "max_jobs": 1},
            ],
        },
    ],
    "environments": [{"name": "gyre", "env_vars": [["OMP_NUM_THREADS", "1"]]}],
}
