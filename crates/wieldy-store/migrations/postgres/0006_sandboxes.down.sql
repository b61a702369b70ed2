DROP TABLE sandboxes;
