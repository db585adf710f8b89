"""Flags of training in a rehearsal: tiny programs, the same for all parts, because compiling takes most of its time."""

SMALL = "--num_envs 8 --hidden_size 8 --buffer_size 512 --batch_size 8"
FLAGS = {
    "coma": "--config coma_quick --hidden_size 8 --num_agents 2 --budget 2 --q 2 --num_envs 2 --num_epochs 1 "
    "--critic_warmup 10",
    "ddpg": "--config ddpg_quick --env snakes --height 3 --width 4 --snakes 2 --beans 1 --learning_starts 0 "
    f"--opponent 0 {SMALL}",
    "sac": f"--config sac_quick --random_steps 0 {SMALL}",
}
