"""Ways to bring a training: a program of five changed lines, YOLO, and the trainers of other libraries."""
