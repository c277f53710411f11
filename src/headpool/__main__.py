from headpool.cli import main

main()
