"""How documents look: tables for people, JSON and YAML for programs. No renderer talks to a daemon."""
